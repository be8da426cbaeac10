// Streaming XXH3-128, seed 0, canonical bytes. Each instruction set compiles its own copy of xxHash (all static).
#pragma once

#include <memory>

#include "common.hpp"

namespace weightcast {

constexpr size_t kDigestBytes = 16;

struct alignas(64) DigestState {
    uint8_t opaque[640];
};

struct DigestFunctions {
    void (*reset)(DigestState& state);
    void (*update)(DigestState& state, const void* data, size_t size);
    void (*finish)(const DigestState& state, uint8_t out[kDigestBytes]);
};

const DigestFunctions& portable_digest();
const DigestFunctions& avx2_digest();

// The fastest this processor has.
const DigestFunctions& digest_functions();

class Digest {
  public:
    Digest() : functions_(digest_functions()) { functions_.reset(state_); }
    void update(const void* data, size_t size) { functions_.update(state_, data, size); }
    void finish(uint8_t out[kDigestBytes]) const { functions_.finish(state_, out); }

  private:
    const DigestFunctions& functions_;
    DigestState state_;
};

// What is hashed while a coder passes: the base, and what it becomes. Either may be missing. One for each chunk after the
// other, in order.
struct Digests {
    Digests(bool base, bool result)
        : of_base(base ? new Digest : nullptr), of_result(result ? new Digest : nullptr) {}
    bool any() const { return of_base || of_result; }

    std::unique_ptr<Digest> of_base, of_result;
};

// Feeds a digest with an array from its first byte to its last, piece by piece, as somebody else goes through it and
// has each piece in the cache.
class Trail {
  public:
    Trail(Digest* digest, const void* begin) : digest_(digest), at_((const uint8_t*)begin) {}

    // Everything before `end` that has not been hashed. Without a digest nothing.
    void reach(const void* end) {
        if (!digest_ || (const uint8_t*)end <= at_) return;
        digest_->update(at_, (size_t)((const uint8_t*)end - at_));
        at_ = (const uint8_t*)end;
    }

  private:
    Digest* digest_;
    const uint8_t* at_;
};

}  // namespace weightcast
