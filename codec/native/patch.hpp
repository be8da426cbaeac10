// Whole-tensor passes beside the coder: counting what differs, storing changes, hashing a patched base.
#pragma once

#include <vector>

#include "digest.hpp"
#include "ulp.hpp"

namespace weightcast {

// How many of `count` elements of `width` bytes (1, 2, 4 or 8) differ.
uint64_t count_changed(const void* a, const void* b, size_t count, int width);

// buffer[index[i]] = bits[i]; false, with nothing stored, unless the indices ascend strictly below count.
bool scatter(void* buffer, size_t count, int width, const uint32_t* index, const void* bits, size_t changes);

// Hashes a base as it is and as it will be after its changes, through a tile that stays in the second-level cache: the
// base is only read, the patched whole never exists.
class Patched final : public Sink {
  public:
    Patched(const void* base, int width, Digests& digests);
    void take(size_t from, size_t n, const uint32_t* index, const void* bits, size_t changes) override;

  private:
    const uint8_t* base_;
    size_t width_;
    Digests& digests_;
    std::vector<uint8_t> tile_;
};

// Feeds base as it is and with all changes stored; false, with nothing fed, if the indices do not ascend strictly below
// count.
bool digest_patched(const void* base, size_t count, int width, const uint32_t* index, const void* bits, size_t changes,
                    Digests& digests);

// Feeds both arrays; the base only if its digest is wanted.
void digest_both(const void* base, size_t base_size, const void* result, size_t size, Digests& digests);

}  // namespace weightcast
