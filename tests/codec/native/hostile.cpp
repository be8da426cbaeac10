// Round trips and hostile bodies, for a build with sanitizers: `hostile SEED CASES` or `hostile SEED SECONDSs`.
//
// Every array is a heap block of exactly its size, so that a read or write past it is found. Exits 0 and prints how
// many bodies were tried; any wrong result ends it with the seed of the case.
#include <chrono>
#include <string>

#include "cases.hpp"
#include "sample.hpp"

using namespace weightcast;

namespace {

constexpr int kDamaged = 20;  // bodies, of each good one

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

// What the encoder counts on the way is what there is, in every set of kernels.
void check_counts(const Case& c, const Counted& fast, const Counted& portable, uint64_t seed) {
    if (fast.changed != portable.changed || fast.runs != portable.runs || fast.segments != portable.segments ||
        fast.clustered() != portable.clustered())
        fail("the kernels count differently", seed);
    uint64_t changed = 0, runs = 0, segments = 0;
    const size_t width = (size_t)c.dtype.width;
    for (size_t i = 0, run = 0, segment = 0; i < c.count; i++) {
        if (!std::memcmp(c.base.get() + i * width, c.fresh.get() + i * width, width)) continue;
        changed++;
        if (run < i / 64 + 1) runs++, run = i / 64 + 1;
        if (segment < i / kSegment + 1) segments++, segment = i / kSegment + 1;
    }
    if (changed != fast.changed || changed != count_changed(c.base.get(), c.fresh.get(), c.count, c.dtype.width))
        fail("changes are miscounted", seed);
    if (runs != fast.runs || segments != fast.segments) fail("runs or segments are miscounted", seed);
}

// The encoder's body, the same from every set of kernels, and its digests.
std::vector<uint8_t> encode(const Case& c, Counted& counted, uint64_t seed) {
    std::vector<uint8_t> body, portable_body;
    Digests along(true, true);
    counted = encode_body(c.base.get(), c.fresh.get(), c.count, c.dtype, false, body, &along);
    check_counts(c, counted, encode_body(c.base.get(), c.fresh.get(), c.count, c.dtype, true, portable_body), seed);
    if (body != portable_body) fail("the kernels encode differently", seed);
    uint8_t wanted[16], digest[16];
    digest_of(c.fresh.get(), c.bytes(), wanted);
    along.of_result->finish(digest);
    if (std::memcmp(digest, wanted, 16)) fail("the encoder's digest is wrong", seed);
    digest_of(c.base.get(), c.bytes(), wanted);
    along.of_base->finish(digest);
    if (std::memcmp(digest, wanted, 16)) fail("the encoder's digest of the base is wrong", seed);
    return body;
}

void check_good_body(const Case& c, const std::vector<uint8_t>& body, uint64_t seed) {
    std::vector<uint8_t> out;
    uint8_t wanted[16], digest[16];
    digest_of(c.fresh.get(), c.bytes(), wanted);
    for (const bool portable : {false, true}) {
        if (!decode(c, body, portable, out, digest)) fail("a good body was refused", seed);
        if (!std::equal(out.begin(), out.end(), c.fresh.get())) fail("a good body gave wrong weights", seed);
        if (std::memcmp(digest, wanted, 16)) fail("the digest is wrong", seed);
    }
}

// How many bodies were tried.
uint64_t run_small(uint64_t seed) {
    Random random(seed);
    const Case c = draw(random), other = draw(random);
    Counted counted;
    const std::vector<uint8_t> bodies[] = {encode(c, counted, seed), foreign_body(c, random)};
    const std::vector<uint8_t> others[] = {encode(other, counted, seed), foreign_body(other, random)};
    for (const std::vector<uint8_t>& body : bodies) {
        check_good_body(c, body, seed);
        for (int i = 0; i < kDamaged; i++) check_bad_body(c, damage(body, others[below(random, 2)], random), seed);
    }
    return 2 * (1 + kDamaged);
}

uint64_t run_large(uint64_t seed, const Dtype& dtype) {
    Random random(seed);
    const Case c = draw_large(random, dtype);
    Counted counted;
    const std::vector<uint8_t> body = encode(c, counted, seed);
    if (body[1] != kSmallestChosen) fail("chunks are not small where that saves much", seed);
    if (!counted.clustered()) fail("changes in every other segment are not clustered", seed);
    check_good_body(c, body, seed);
    check_bad_body(c, damage(body, body, random), seed);
    return 2;
}

// One case in this many is large; of each width in turn.
constexpr uint64_t kLargeOneIn = 64;

uint64_t run_case(uint64_t seed) {
    return seed % kLargeOneIn ? run_small(seed) : run_large(seed, kDtypes[seed / kLargeOneIn * 2 % 5]);
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
