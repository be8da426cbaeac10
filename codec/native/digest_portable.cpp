// xxHash takes what every processor of the target has by itself: SSE2 on x86-64, NEON on 64-bit ARM.
#define XXH_INLINE_ALL
#include "digest.hpp"
#include "processor.hpp"
#include "third_party/xxhash.h"

namespace weightcast {
namespace portable {
#include "digest.inl"
}  // namespace portable

const DigestFunctions& portable_digest() { return portable::kFunctions; }

const DigestFunctions& digest_functions() {
#if defined(WEIGHTCAST_AVX2)
    if (has_avx2()) return avx2_digest();
#endif
    return portable_digest();
}

}  // namespace weightcast
