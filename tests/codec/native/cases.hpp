// What the programs of this folder share: drawn cases, bodies that another encoder may write, decoding into blocks of
// exactly the claimed size, checks.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "patch.hpp"

namespace weightcast {

using Random = std::mt19937_64;

struct Case {
    Dtype dtype;
    size_t count;
    std::unique_ptr<uint8_t[]> base, fresh;
    size_t bytes() const { return count * (size_t)dtype.width; }
};

inline uint64_t below(Random& random, uint64_t n) { return random() % n; }

// Weight i of an array.
inline uint32_t load(const uint8_t* weights, size_t i, size_t width) {
    uint32_t w = 0;
    std::memcpy(&w, weights + i * width, width);
    return w;
}

[[noreturn]] void fail(const char* what, uint64_t seed);

inline const Dtype kDtypes[] = {{1, {4, 3}}, {1, {5, 2}}, {2, {8, 7}}, {2, {5, 10}}, {4, {8, 23}}};

// Usual weights or any bits, changed by small steps or to any bits. In some cases a third is tiny, and is replaced by
// usual ones: then exponents are coded, and what is tiny again is an escape.
Case draw(Random& random);

// So large that the encoder samples it and weighs chunks against each other: a part full of changes, in every other
// segment of it, one without any, and the beginning of a third.
Case draw_large(Random& random, const Dtype& dtype);

// A body of the case that says what ours says in other words: by any model, in chunks of any size. What our encoder
// never chooses, a decoder reads all the same.
std::vector<uint8_t> foreign_body(const Case& c, Random& random);

void digest_of(const uint8_t* data, size_t size, uint8_t out[16]);

// Decodes into blocks of exactly the claimed size; true with the result in `out` if the body was accepted.
bool decode(const Case& c, const std::vector<uint8_t>& bytes, bool portable, std::vector<uint8_t>& out,
            uint8_t digest[16]);

// Both sets of kernels do the same with a body that nobody vouches for, and the digest is that of the result.
void check_bad_body(const Case& c, const std::vector<uint8_t>& bad, uint64_t seed);

}  // namespace weightcast
