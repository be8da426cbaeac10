#include "processor.hpp"

#if defined(WEIGHTCAST_AVX2)
#include <cpuid.h>
#endif

namespace weightcast {

#if defined(WEIGHTCAST_AVX2)
bool has_avx2() {
    static const bool has = [] {
        // LZCNT by its bit, since older compilers do not know the name: a processor without it runs BSR, silently.
        unsigned a, b, c = 0, d;
        const bool lzcnt = __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & 1u << 5);
        return lzcnt && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
               __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    }();
    return has;
}
#else
bool has_avx2() { return false; }
#endif

}  // namespace weightcast
