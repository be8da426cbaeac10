#define XXH_INLINE_ALL
#include "digest.hpp"
#include "third_party/xxhash.h"

namespace weightcast {
namespace avx2 {
#include "digest.inl"
}  // namespace avx2

const DigestFunctions& avx2_digest() { return avx2::kFunctions; }

}  // namespace weightcast
