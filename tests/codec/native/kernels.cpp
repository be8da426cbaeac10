// Every kernel of the set that this processor gets against the portable one: `kernels SEED CASES`.
//
// Arrays are heap blocks of exactly their size. Prints what was compared and exits 0, or says which kernel differs and
// for which seed. Whole bodies are compared by hostile.cpp.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "patch.hpp"
#include "spares.hpp"
// After digest.hpp, and scalar: what the digest is compared with has no vector instructions by hand.
#define XXH_INLINE_ALL
#define XXH_VECTOR 0
#include "third_party/xxhash.h"

using namespace weightcast;

namespace {

using Random = std::mt19937_64;
using Bytes = std::vector<uint8_t>;

uint64_t seed;

void require(bool holds, const char* what) {
    if (holds) return;
    std::printf("%s, case seed %llu\n", what, (unsigned long long)seed);
    std::exit(1);
}

uint64_t below(Random& random, uint64_t n) { return random() % n; }

// Lengths around every width that a loop works in, and any other.
size_t draw_count(Random& random, size_t most) {
    static const size_t edges[] = {0, 1, 7, 8, 15, 16, 31, 32, 63, 64, 65, 127, 128, 255, 256, 257, 512, 768, 4095, 4096};
    const size_t n = below(random, 2) ? edges[below(random, 20)] : below(random, most + 1);
    return std::min(n, most);
}

Bytes draw_bytes(Random& random, size_t size) {
    Bytes out(size);
    for (uint8_t& b : out) b = (uint8_t)random();
    return out;
}

// A copy of which about one byte in `one_in` is another.
Bytes altered(const Bytes& from, Random& random, uint64_t one_in) {
    Bytes out = from;
    for (uint8_t& b : out)
        if (!below(random, one_in)) b = (uint8_t)random();
    return out;
}

HazardTable draw_hazards(Random& random, Field field) {
    Model model;
    model.field = field;
    model.lowest = (uint8_t)below(random, uint64_t{1} << field.exponent_bits);
    const uint64_t kind = below(random, 4);  // all codes, low ones, high ones, or a single class
    for (int c = 0; c < kClasses; c++)
        model.code[c] = (uint8_t)(kind == 1   ? below(random, 60)
                                  : kind == 2 ? kHazardCodes - 1 - below(random, 20)
                                  : kind == 3 ? (c == 9) * 100
                                              : below(random, kHazardCodes));
    return make_hazards(model);
}

struct Set {
    Dtype dtype;
    const Kernels &fast, &plain;
};

Set draw_set(Random& random) {
    static const Dtype dtypes[] = {{1, {4, 3}}, {1, {5, 2}}, {1, {2, 5}}, {2, {8, 7}}, {2, {5, 10}}, {4, {8, 23}}};
    const Dtype& d = dtypes[below(random, 6)];
    return {d, kernels(d.width, false), kernels(d.width, true)};
}

void check_diff(Random& random) {
    const Set s = draw_set(random);
    const size_t count = draw_count(random, kSegment), masks = (count + 63) / 64;
    const Bytes a = draw_bytes(random, count * (size_t)s.dtype.width);
    const Bytes b = altered(a, random, uint64_t{1} << below(random, 12));
    const std::unique_ptr<uint64_t[]> fast(new uint64_t[masks]), plain(new uint64_t[masks]);
    s.fast.diff(a.data(), b.data(), count, fast.get());
    s.plain.diff(a.data(), b.data(), count, plain.get());
    require(std::equal(fast.get(), fast.get() + masks, plain.get()), "diff differs");
}

void require_same_scan(const Scan& a, const Scan& b, bool masks) {
    require(a.blocks == b.blocks, "scan: another number of blocks");
    require(!std::memcmp(a.sums, b.sums, a.blocks * sizeof(BlockSums)), "scan: other sums");
    require(!std::memcmp(a.classes, b.classes, a.blocks * kBlock), "scan: other classes");
    if (!masks) return;
    require(a.dirty == b.dirty, "scan: other masks are dirty");
    for (uint64_t d = a.dirty; d; d &= d - 1)
        require(a.masks[lowest_bit(d)] == b.masks[lowest_bit(d)], "scan: another mask");
}

void check_scan(Random& random) {
    const Set s = draw_set(random);
    const HazardTable hazards = draw_hazards(random, s.dtype.field);
    const size_t count = draw_count(random, kSegment);
    const Bytes before = draw_bytes(random, count * (size_t)s.dtype.width);
    const Bytes after = altered(before, random, uint64_t{1} << below(random, 12));
    const bool encodes = below(random, 2);
    const void* fresh = encodes && count ? after.data() : nullptr;
    static Scan fast, plain;
    std::memset((void*)&fast, 0xa5, sizeof fast);
    std::memset((void*)&plain, 0x5a, sizeof plain);
    s.fast.scan(before.data(), fresh, count, hazards, fast);
    s.plain.scan(before.data(), fresh, count, hazards, plain);
    require_same_scan(fast, plain, fresh);
}

// One lane's events over several segments, the last one cut short.
void check_encode(Random& random) {
    const Set s = draw_set(random);
    const HazardTable hazards = draw_hazards(random, s.dtype.field);
    const size_t segments = 1 + below(random, 4), width = (size_t)s.dtype.width;
    static Found found[2];
    static Scan scan;
    std::vector<Interval> events[2];
    LaneEncoder lanes[2];
    for (int i = 0; i < 2; i++) {
        events[i].resize(segments * kMostEvents);
        lanes[i] = {0, events[i].data(), events[i].data(), false};
    }
    const uint64_t one_in = uint64_t{1} << below(random, 12);
    for (size_t n = 0; n < segments; n++) {
        const size_t count = n + 1 < segments ? kSegment : 1 + below(random, kSegment);
        const Bytes before = draw_bytes(random, count * width), after = altered(before, random, one_in);
        s.plain.scan(before.data(), after.data(), count, hazards, scan);
        s.fast.encode(lanes[0], scan, hazards, found[0], {nullptr, 0});
        s.plain.encode(lanes[1], scan, hazards, found[1], {nullptr, 0});
        require(found[0].count == found[1].count, "encode finds another number of changes");
        require(!std::memcmp(found[0].positions, found[1].positions, 2 * found[0].count), "encode finds other changes");
    }
    const size_t made = (size_t)(lanes[0].end - events[0].data());
    require(lanes[0].base == lanes[1].base, "encode ends at another base");
    require(made == (size_t)(lanes[1].end - events[1].data()), "encode makes another number of events");
    require(lanes[0].used - events[0].data() == lanes[1].used - events[1].data(), "encode uses other events");
    require(!std::memcmp(events[0].data(), events[1].data(), made * sizeof(Interval)), "encode makes other events");
    require(lanes[0].impossible == lanes[1].impossible, "encode holds other changes possible");
}

LaneDecoder draw_lane(Random& random, const std::vector<uint32_t>& words) {
    LaneDecoder lane = {kStateLow + below(random, kStateHigh - kStateLow),
                        kStateLow + below(random, kStateHigh - kStateLow),
                        {words.data(), words.data() + words.size() - 1},
                        0,
                        0,
                        0,
                        1 + below(random, below(random, 2) ? 40 : 20000)};
    lane.target = hazard_below(kSurvival, (uint32_t)(lane.state & kPointMask));
    lane.next_distance = hazard_below(kSurvival, (uint32_t)(lane.next_state & kPointMask));
    return lane;
}

bool same_lane(const LaneDecoder& a, const LaneDecoder& b) {
    return a.state == b.state && a.next_state == b.next_state && a.words.at == b.words.at && a.base == b.base &&
           a.target == b.target && a.next_distance == b.next_distance && a.changes_left == b.changes_left;
}

// Any words are a stream of events until they run out, and then still safe to decode.
void check_decode(Random& random) {
    const Set s = draw_set(random);
    const HazardTable hazards = draw_hazards(random, s.dtype.field);
    const size_t pairs = 1 + below(random, 3), width = (size_t)s.dtype.width;
    static Found fast_found[2], plain_found[2];
    static Scan scans[2];
    std::vector<uint32_t> words(1 + below(random, 5000));
    for (uint32_t& w : words) w = (uint32_t)random();
    LaneDecoder fast[2], plain[2];
    for (int i = 0; i < 2; i++) fast[i] = plain[i] = draw_lane(random, words);
    for (size_t n = 0; n < pairs; n++) {
        for (Scan& scan : scans) {
            const size_t count = n + 1 < pairs ? kSegment : draw_count(random, kSegment);
            s.plain.scan(draw_bytes(random, count * width).data(), nullptr, count, hazards, scan);
        }
        s.fast.decode(fast, scans, hazards, fast_found);
        s.plain.decode(plain, scans, hazards, plain_found);
        for (int i = 0; i < 2; i++) {
            require(fast_found[i].count == plain_found[i].count, "decode finds another number of changes");
            require(!std::memcmp(fast_found[i].positions, plain_found[i].positions, 2 * fast_found[i].count),
                    "decode finds other changes");
            require(same_lane(fast[i], plain[i]), "decode leaves the lane elsewhere");
        }
    }
}

void check_digest(Random& random) {
    const size_t size = below(random, 4) ? below(random, 3000) : below(random, 100000);
    const Bytes data = draw_bytes(random, size);
    XXH128_canonical_t wanted;
    XXH128_canonicalFromHash(&wanted, XXH3_128bits(data.data(), size));
    for (const DigestFunctions* functions : {&digest_functions(), &portable_digest()}) {
        DigestState state;
        functions->reset(state);
        for (size_t at = 0; at < size;) {
            const size_t here = std::min<size_t>(size - at, 1 + below(random, below(random, 2) ? 300 : 40000));
            functions->update(state, data.data() + at, here);
            at += here;
        }
        uint8_t out[kDigestBytes];
        functions->finish(state, out);
        require(!std::memcmp(out, wanted.digest, kDigestBytes), "the digest differs from a scalar XXH3");
    }
}

// Counting, storing and hashing, against a loop over bytes.
void check_patch(Random& random) {
    const size_t width = size_t{1} << below(random, 4), count = draw_count(random, 40000);
    const std::unique_ptr<uint64_t[]> room(new uint64_t[count]);  // aligned for every width
    const Bytes base = draw_bytes(random, count * width);
    const Bytes fresh = altered(base, random, uint64_t{1} << below(random, 12));
    std::vector<uint32_t> index;
    Bytes bits;
    for (size_t i = 0; i < count; i++) {
        if (!std::memcmp(&base[i * width], &fresh[i * width], width)) continue;
        index.push_back((uint32_t)i);
        bits.insert(bits.end(), fresh.begin() + (long)(i * width), fresh.begin() + (long)((i + 1) * width));
    }
    const int w = (int)width;
    require(count_changed(base.data(), fresh.data(), count, w) == index.size(), "changes are miscounted");
    Digests digests(false, true);
    require(digest_patched(base.data(), count, w, index.data(), bits.data(), index.size(), digests),
            "good indices were refused");
    uint8_t digest[kDigestBytes];
    digests.of_result->finish(digest);
    XXH128_canonical_t wanted;
    XXH128_canonicalFromHash(&wanted, XXH3_128bits(fresh.data(), fresh.size()));
    require(!std::memcmp(digest, wanted.digest, kDigestBytes), "the patched digest is wrong");
    std::copy(base.begin(), base.end(), (uint8_t*)room.get());
    require(scatter(room.get(), count, w, index.data(), bits.data(), index.size()), "good indices were refused");
    require(!count || !std::memcmp(room.get(), fresh.data(), fresh.size()), "scatter stored something else");
}

// As an encoder's memory: knows whether anybody else holds it.
struct Kept {
    size_t size = 0;
    bool held = false;
    size_t bytes() const { return size; }
};

// Holds up to `deep` at a time, which are all different; what is kept meanwhile stays within its bound.
void hold_spares(Random& random, size_t deep) {
    Spare<Kept> spare;
    require(!(*spare).held, "a spare was given to two");
    (*spare).held = true;
    (*spare).size = std::max((*spare).size, below(random, kKeptBytes / 8 * 9));
    if (deep) hold_spares(random, deep - 1);
    require(kept_bytes <= kKeptBytes, "more is kept than may be");
    (*spare).held = false;
}

void check_spares(Random& random) {
    const uint64_t other_seed = random();
    std::thread other([&] {
        Random own(other_seed);
        hold_spares(own, below(own, 4));
    });
    hold_spares(random, below(random, 100));
    other.join();
}

const char* set_name() {
    if (&kernels(1, false) == &portable_kernels(1)) return "portable";
#if defined(WEIGHTCAST_NEON)
    return "NEON";
#else
    return "AVX2";
#endif
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return std::fputs("usage: kernels SEED CASES\n", stderr), 2;
    const uint64_t first = std::strtoull(argv[1], nullptr, 10), cases = std::strtoull(argv[2], nullptr, 10);
    for (seed = first; seed < first + cases; seed++) {
        Random random(seed);
        for (auto check : {check_diff, check_scan, check_encode, check_decode, check_digest, check_patch, check_spares})
            check(random);
    }
    std::printf("%s: %llu cases\n", set_name(), (unsigned long long)cases);
    return 0;
}
