// Find out which of the built instruction sets this machine can run.
#include "ropewalk.h"

#ifdef ROPEWALK_HAS_avx2
#include <cpuid.h>

// Before Clang 18, __builtin_cpu_supports does not accept f16c.
static bool has_f16c() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

namespace ropewalk {
namespace baseline { extern const ropewalk_kernels kernels; }
namespace avx2 { extern const ropewalk_kernels kernels; }
namespace avx512 { extern const ropewalk_kernels kernels; }
namespace avx512_bf16 { extern const ropewalk_kernels kernels; }
}  // namespace ropewalk

const ropewalk_kernels *ropewalk_get(ropewalk_level level) {
    using namespace ropewalk;
    // __builtin_cpu_supports also checks that the operating system saves the registers.
    switch (level) {
        case ROPEWALK_BASELINE:
            return &baseline::kernels;
#ifdef ROPEWALK_HAS_avx2
        case ROPEWALK_AVX2: {
            bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
            return can ? &avx2::kernels : nullptr;
        }
#endif
#ifdef ROPEWALK_HAS_avx512
        case ROPEWALK_AVX512: {
            bool can = ropewalk_get(ROPEWALK_AVX2) && __builtin_cpu_supports("avx512f") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vl");
            return can ? &avx512::kernels : nullptr;
        }
#endif
#ifdef ROPEWALK_HAS_avx512_bf16
        case ROPEWALK_AVX512_BF16: {
            bool can = ropewalk_get(ROPEWALK_AVX512) && __builtin_cpu_supports("avx512bf16");
            return can ? &avx512_bf16::kernels : nullptr;
        }
#endif
        default:
            return nullptr;
    }
}

const ropewalk_kernels *ropewalk_best(void) {
    for (int level = ROPEWALK_LEVELS - 1;; --level) {
        if (const ropewalk_kernels *kernels = ropewalk_get(static_cast<ropewalk_level>(level))) return kernels;
    }
}
