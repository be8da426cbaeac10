// ulp_v1: bodies as FORMAT-ulp.md defines them. Pure functions over memory; safe on any body.
#pragma once

#include <exception>
#include <vector>

#include "digest.hpp"
#include "kernels.hpp"

namespace weightcast {

// A dtype that ulp_v1 can code: width in bytes (1, 2, 4), and where its exponent is.
struct Dtype {
    int width;
    Field field;
};

// Whether the fields fit the width and the kernels: 1 sign bit, 2 to 8 exponent bits, at least 1 mantissa bit.
bool is_supported(const Dtype& dtype);

// What an encoder learns by the way: how many weights differ, and in how many runs of 64 and segments there are such
// weights; `likely_`: if each weight of a chunk differed independently, in units of 2^-32.
struct Counted {
    uint64_t changed = 0, runs = 0, segments = 0, likely_runs = 0, likely_segments = 0;

    void operator+=(const Counted& more);
    bool clustered() const;  // in fewer by a tenth
};

// Somebody wrote into the arrays while they were encoded. Not all such writes are noticed.
struct ArraysChanged : std::exception {};

// Appends the body for base -> fresh to `out`. With `portable` the kernels that every processor has are used; the
// bytes are the same. `digests`, unless null, are fed on the way. Throws ArraysChanged.
Counted encode_body(const void* base, const void* fresh, size_t count, const Dtype& dtype, bool portable,
                    std::vector<uint8_t>& out, Digests* digests = nullptr);

// How many changes a body claims, and that its lengths agree with each other and with `count`. Reads a few bytes of
// each chunk.
Fault count_changes(const uint8_t* body, size_t size, size_t count, uint64_t& changes);

// Receives the digest's input piece by piece while it is in the cache; see patch.hpp.
class Sink {
  public:
    virtual ~Sink() = default;
    // The weights [from, from + n) and all changes in it: index ascending, absolute.
    virtual void take(size_t from, size_t n, const uint32_t* index, const void* bits, size_t changes) = 0;
};

// Decodes against a read-only base into `changes` (as count_changes gave it) ascending indices and new bits. On a
// fault their contents are unspecified, but nothing else was written. `sink` may be null.
Fault decode_body(const void* base, size_t count, const Dtype& dtype, const uint8_t* body, size_t size, bool portable,
                  uint32_t* index, void* bits, uint64_t changes, Sink* sink);

}  // namespace weightcast
