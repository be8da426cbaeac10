// Round trips and hostile bodies, for a build with sanitizers: `hostile SEED CASES` or `hostile SEED SECONDSs`.
//
// Every array is a heap block of exactly its size, so that a read or write past it is found. Exits 0 and prints how
// many bodies were tried; any wrong result ends it with the seed of the case.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>

#include "patch.hpp"

using namespace weightcast;

namespace {

using Random = std::mt19937_64;

struct Case {
    Dtype dtype;
    size_t count;
    std::unique_ptr<uint8_t[]> base, fresh;
    size_t bytes() const { return count * (size_t)dtype.width; }
};

uint64_t below(Random& random, uint64_t n) { return random() % n; }

[[noreturn]] void fail(const char* what, uint64_t seed) {
    std::printf("%s, case seed %llu\n", what, (unsigned long long)seed);
    std::exit(1);
}

// Weights that cluster in a few exponents, changed by small steps or replaced.
Case draw(Random& random) {
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

// Decodes into blocks of exactly the claimed size; true with the result in `out` if the body was accepted.
bool decode(const Case& c, const std::vector<uint8_t>& bytes, bool portable, std::vector<uint8_t>& out,
            uint8_t digest[16]) {
    const std::unique_ptr<uint8_t[]> body(new uint8_t[bytes.size()]);
    std::copy(bytes.begin(), bytes.end(), body.get());
    uint64_t changes = 0;
    if (count_changes(body.get(), bytes.size(), c.count, changes) != Fault::none) return false;
    if (changes > c.count) std::abort();
    const std::unique_ptr<uint32_t[]> index(new uint32_t[changes]);
    const std::unique_ptr<uint32_t[]> bits(new uint32_t[changes]);  // aligned for every width
    PatchedDigest sink(c.base.get(), c.dtype.width);
    if (decode_body(c.base.get(), c.count, c.dtype, body.get(), bytes.size(), portable, index.get(), bits.get(),
                    changes, &sink) != Fault::none)
        return false;
    sink.finish(digest);
    out.assign(c.base.get(), c.base.get() + c.bytes());
    if (!scatter(out.data(), c.count, c.dtype.width, index.get(), bits.get(), changes)) std::abort();
    return true;
}

void digest_of(const uint8_t* data, size_t size, uint8_t out[16]) {
    Digest d;
    d.update(data, size);
    d.finish(out);
}

std::vector<uint8_t> damage(std::vector<uint8_t> body, const std::vector<uint8_t>& other, Random& random) {
    const uint64_t kind = below(random, 6);
    if (kind == 0) body.resize(below(random, body.size() + 1));
    if (kind == 1) body.insert(body.end(), 1 + below(random, 9), (uint8_t)random());
    if (kind == 2 && other.size() > 2)
        std::copy(other.begin(), other.begin() + (long)std::min(other.size(), body.size()) / 2, body.begin());
    if (kind == 3)
        for (uint8_t& b : body) b = (uint8_t)random();
    if (kind == 3 && body.size() > 1) body[0] = 0, body[1] = 24;
    if (kind >= 4 && !body.empty()) {
        // Most damage to the head, where the counts and the model are.
        for (uint64_t n = 1 + below(random, 3); n; n--) {
            const size_t at = below(random, kind == 4 ? std::min<size_t>(body.size(), 60) : body.size());
            body[at] = below(random, 2) ? (uint8_t)random() : (uint8_t)(body[at] ^ 1u << below(random, 8));
        }
    }
    return body;
}

uint64_t run_case(uint64_t seed) {
    Random random(seed);
    const Case c = draw(random);
    std::vector<uint8_t> body, portable_body, out, portable_out;
    const uint64_t changed = encode_body(c.base.get(), c.fresh.get(), c.count, c.dtype, false, body);
    if (encode_body(c.base.get(), c.fresh.get(), c.count, c.dtype, true, portable_body) != changed ||
        body != portable_body)
        fail("the kernels encode differently", seed);
    if (changed != count_changed(c.base.get(), c.fresh.get(), c.count, c.dtype.width))
        fail("changes are miscounted", seed);
    uint8_t wanted[16], digest[16];
    digest_of(c.fresh.get(), c.bytes(), wanted);
    for (const bool portable : {false, true}) {
        if (!decode(c, body, portable, out, digest)) fail("a good body was refused", seed);
        if (!std::equal(out.begin(), out.end(), c.fresh.get())) fail("a good body gave wrong weights", seed);
        if (std::memcmp(digest, wanted, 16)) fail("the digest is wrong", seed);
    }
    const Case other = draw(random);
    std::vector<uint8_t> other_body;
    encode_body(other.base.get(), other.fresh.get(), other.count, other.dtype, false, other_body);
    for (int i = 0; i < 40; i++) {
        const std::vector<uint8_t> bad = damage(body, other_body, random);
        uint8_t portable_digest[16];
        const bool accepted = decode(c, bad, false, out, digest);
        if (accepted != decode(c, bad, true, portable_out, portable_digest))
            fail("the kernels disagree on a bad body", seed);
        if (accepted && (out != portable_out || std::memcmp(digest, portable_digest, 16)))
            fail("the kernels decode a bad body differently", seed);
        if (accepted) {
            digest_of(out.data(), out.size(), wanted);
            if (std::memcmp(digest, wanted, 16)) fail("the digest is not that of the result", seed);
        }
    }
    return 42;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return std::fputs("usage: hostile SEED CASES|SECONDSs\n", stderr), 2;
    const uint64_t seed = std::strtoull(argv[1], nullptr, 10);
    const std::string amount = argv[2];
    const bool timed = amount.back() == 's';
    const uint64_t limit = std::strtoull(argv[2], nullptr, 10);
    const auto stop = std::chrono::steady_clock::now() + std::chrono::seconds(timed ? limit : 0);
    uint64_t bodies = 0;
    for (uint64_t i = 0; timed ? std::chrono::steady_clock::now() < stop : i < limit; i++) bodies += run_case(seed + i);
    std::printf("%llu bodies\n", (unsigned long long)bodies);
    return 0;
}
