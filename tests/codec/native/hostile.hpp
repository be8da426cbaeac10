// What the programs of this folder share: drawn cases, decoding into blocks of exactly the claimed size, checks.
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

[[noreturn]] inline void fail(const char* what, uint64_t seed) {
    std::fprintf(stderr, "%s, case seed %llu\n", what, (unsigned long long)seed);
    std::abort();
}

// Weights that cluster in a few exponents, changed by small steps or replaced.
inline Case draw(Random& random) {
    static const Dtype dtypes[] = {{1, {4, 3}}, {1, {5, 2}}, {2, {8, 7}}, {2, {5, 10}}, {4, {8, 23}}};
    static const size_t counts[] = {0, 1, 7, 8, 9, 255, 256, 257, 1000, 4095, 4096, 4097, 8192, 8193, 12289, 20001};
    Case c;
    c.dtype = dtypes[below(random, 5)];
    c.count = below(random, 2) ? counts[below(random, 16)] : below(random, 9000);
    c.base.reset(new uint8_t[c.bytes()]);
    c.fresh.reset(new uint8_t[c.bytes()]);
    const bool any = below(random, 4) == 0;
    const size_t width = (size_t)c.dtype.width;
    for (size_t i = 0; i < c.count; i++) {
        uint32_t w = (uint32_t)random();
        if (!any) {
            const int mantissa = c.dtype.field.mantissa_bits;
            const uint32_t exponent =
                ((1u << c.dtype.field.exponent_bits) / 2) - (uint32_t)lowest_bit(random() | 1 << 9);
            w = (w & ((1u << mantissa) - 1)) | exponent << mantissa | (w >> 31) << (width * 8 - 1);
        }
        std::memcpy(c.base.get() + i * width, &w, width);
    }
    std::copy(c.base.get(), c.base.get() + c.bytes(), c.fresh.get());
    const uint64_t one_in = uint64_t{1} << below(random, 13);
    for (size_t i = 0; i < c.count; i++) {
        if (below(random, one_in)) continue;
        uint32_t w = 0;
        std::memcpy(&w, c.fresh.get() + i * width, width);
        w = below(random, 9) ? w + 1 - 2 * (uint32_t)below(random, 2) : (uint32_t)random();
        std::memcpy(c.fresh.get() + i * width, &w, width);
    }
    return c;
}

inline void digest_of(const uint8_t* data, size_t size, uint8_t out[16]) {
    Digest d;
    d.update(data, size);
    d.finish(out);
}

// Decodes into blocks of exactly the claimed size; true with the result in `out` if the body was accepted.
inline bool decode(const Case& c, const std::vector<uint8_t>& bytes, bool portable, std::vector<uint8_t>& out,
            uint8_t digest[16]) {
    const std::unique_ptr<uint8_t[]> body(new uint8_t[bytes.size()]);
    std::copy(bytes.begin(), bytes.end(), body.get());
    uint64_t changes = 0;
    if (count_changes(body.get(), bytes.size(), c.count, changes) != Fault::none) return false;
    if (changes > c.count) std::abort();
    const std::unique_ptr<uint32_t[]> index(new uint32_t[changes]);
    const std::unique_ptr<uint32_t[]> bits(new uint32_t[changes]);  // aligned for every width
    Digests digests(true, true);
    Patched sink(c.base.get(), c.dtype.width, digests);
    if (decode_body(c.base.get(), c.count, c.dtype, body.get(), bytes.size(), portable, index.get(), bits.get(),
                    changes, &sink) != Fault::none)
        return false;
    digests.of_base->finish(digest);
    uint8_t of_base[16];
    digest_of(c.base.get(), c.bytes(), of_base);
    if (std::memcmp(digest, of_base, 16)) std::abort();
    digests.of_result->finish(digest);
    out.assign(c.base.get(), c.base.get() + c.bytes());
    if (!scatter(out.data(), c.count, c.dtype.width, index.get(), bits.get(), changes)) std::abort();
    return true;
}

// Both sets of kernels do the same with a body that nobody vouches for, and the digest is that of the result.
inline void check_bad_body(const Case& c, const std::vector<uint8_t>& bad, uint64_t seed) {
    std::vector<uint8_t> out, portable_out;
    uint8_t wanted[16], digest[16], portable_digest[16];
    const bool accepted = decode(c, bad, false, out, digest);
    if (accepted != decode(c, bad, true, portable_out, portable_digest))
        fail("the kernels disagree on a bad body", seed);
    if (!accepted) return;
    if (out != portable_out || std::memcmp(digest, portable_digest, 16))
        fail("the kernels decode a bad body differently", seed);
    digest_of(out.data(), out.size(), wanted);
    if (std::memcmp(digest, wanted, 16)) fail("the digest is not that of the result", seed);
}

}  // namespace weightcast
