// Distribute rows over torch's OpenMP threads without linking OpenMP, because a second runtime would add a second thread pool.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define ROPEWALK_THREADS
#endif

namespace ropewalk {

#ifdef ROPEWALK_THREADS
// Functions of the OpenMP runtime that torch has loaded into the process: libgomp, or LLVM's or Intel's, which export the same
// names. They are null until kernels/cpu.py passes their addresses. dlsym is not used because glibc 2.34 moved it to another
// library: a binary that is built with a newer glibc would not load with an older one.
struct OpenMP {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = nullptr;
    int (*thread_num)() = nullptr;
    int (*num_threads)() = nullptr;

    bool usable() const { return parallel && thread_num && num_threads; }
};
inline OpenMP openmp;

// A forked process does not have the threads of the pool, and the runtime would wait for them forever. The handler is installed
// when this library is loaded, because torch may start the threads before the first call of this library.
inline bool forked = false;
inline const int handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

// Call work(begin, end) for all of [0, rows), on up to `threads` threads. Each thread processes one contiguous range, the same
// on every call, so that its rows stay in its cache. Without torch's pool, the calling thread processes all rows. `work` must
// not throw.
template <class Work>
void share_rows(int64_t rows, int threads, const Work &work) {
#ifdef ROPEWALK_THREADS
    if (threads > 1 && rows > 1 && !forked) {
        struct Team {
            int64_t rows;
            const Work &work;
        } team{rows, work};
        if (openmp.usable()) {
            auto run_share = [](void *data) {
                const Team &team = *static_cast<const Team *>(data);
                int64_t number = openmp.thread_num(), size = openmp.num_threads();
                team.work(team.rows * number / size, team.rows * (number + 1) / size);
            };
            openmp.parallel(run_share, &team, static_cast<unsigned>(std::min<int64_t>(threads, rows)), 0);
            return;
        }
    }
#endif
    work(int64_t{0}, rows);
}

}  // namespace ropewalk
