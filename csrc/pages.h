// Request large pages for large new outputs: the first access to each 4 KiB page of fresh memory takes longer than rotating its
// contents.
#pragma once

#include <cstdint>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
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

}  // namespace ropewalk
