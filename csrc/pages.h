// The pages of large new outputs. The first access to a page of fresh memory, which the system fills with zeros, takes longer than
// rotating its contents.
#pragma once

#include <cstdint>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace ropewalk {

// Request large pages before the memory is written. This is a hint, without effect on systems that do not support it.
inline void ask_for_large_pages(void *memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t LARGE = uintptr_t{2} << 20;
    uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + LARGE - 1) & ~(LARGE - 1);
    uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) & ~(LARGE - 1);
    if (end > begin) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

// Returns whether the page at an address is in memory: whether it was written since the system provided it. If unknown, it is.
inline bool is_resident(void *memory) {
#if defined(__linux__)
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(memory);
    unsigned char resident = 1;
    return mincore(reinterpret_cast<void *>(at - at % page), 1, &resident) != 0 || (resident & 1);
#else
    (void)memory;
    return true;
#endif
}

// Returns whether to write a large output through the caches instead of past them. Intel's processors need 1.4 to 1.9 times as
// long to write fresh pages past the caches, because the zeros of the system are still there. AMD's need 0.8 to 0.9 of the
// time.
inline bool is_better_through_caches(void *memory, int64_t bytes) {
#if defined(__linux__) && defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") && !is_resident(static_cast<char *>(memory) + bytes / 2);
#else
    (void)memory, (void)bytes;
    return false;
#endif
}

}  // namespace ropewalk
