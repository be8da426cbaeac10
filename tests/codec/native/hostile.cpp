// Round trips and hostile bodies, for a build with sanitizers: `hostile SEED CASES` or `hostile SEED SECONDSs`.
//
// Every array is a heap block of exactly its size, so that a read or write past it is found. Exits 0 and prints how
// many bodies were tried; any wrong result ends it with the seed of the case.
#include <chrono>
#include <string>

#include "hostile.hpp"

using namespace weightcast;

namespace {

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
    Digests along(true, true);
    const uint64_t changed =
        encode_body(c.base.get(), c.fresh.get(), c.count, c.dtype, false, body, &along).changed;
    if (encode_body(c.base.get(), c.fresh.get(), c.count, c.dtype, true, portable_body).changed != changed ||
        body != portable_body)
        fail("the kernels encode differently", seed);
    if (changed != count_changed(c.base.get(), c.fresh.get(), c.count, c.dtype.width))
        fail("changes are miscounted", seed);
    uint8_t wanted[16], wanted_of_base[16], digest[16];
    digest_of(c.fresh.get(), c.bytes(), wanted);
    along.of_result->finish(digest);
    if (std::memcmp(digest, wanted, 16)) fail("the encoder's digest is wrong", seed);
    digest_of(c.base.get(), c.bytes(), wanted_of_base);
    along.of_base->finish(digest);
    if (std::memcmp(digest, wanted_of_base, 16)) fail("the encoder's digest of the base is wrong", seed);
    for (const bool portable : {false, true}) {
        if (!decode(c, body, portable, out, digest)) fail("a good body was refused", seed);
        if (!std::equal(out.begin(), out.end(), c.fresh.get())) fail("a good body gave wrong weights", seed);
        if (std::memcmp(digest, wanted, 16)) fail("the digest is wrong", seed);
    }
    const Case other = draw(random);
    std::vector<uint8_t> other_body;
    encode_body(other.base.get(), other.fresh.get(), other.count, other.dtype, false, other_body);
    for (int i = 0; i < 40; i++) check_bad_body(c, damage(body, other_body, random), seed);
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
