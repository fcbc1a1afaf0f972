// Large pages for large new outputs: the first touch of each 4 KiB page of fresh memory costs more than turning what is in it.
#pragma once

#include <cstdint>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

namespace ropewalk {

// Ask for them before the memory is written. A hint: where the system has none, nothing changes.
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

}  // namespace ropewalk
