#include <algorithm>
#include <vector>

#include "chunk.hpp"

namespace weightcast {
namespace {

// The value stream of a chunk: values in the order of their weights, two states in turn.
struct ValueStream {
    uint64_t state, next_state;
    Words words;
};

// Value models by key of the old weight.
struct ValueLookup {
    const ValueModel* by_key[kMaxKeys];
    uint32_t unit_width[kMaxKeys];  // frequency of a step of one, the common case; 0 where the mode is not step
    Field field;
};

ValueLookup make_lookup(const Model& model) {
    ValueLookup t;
    t.field = model.field;
    for (int key = 0; key < kMaxKeys; key++) {
        const ValueModel* v = &model.values[model.value_of[model.class_of_key(key & (model.keys() - 1))]];
        t.by_key[key] = v;
        t.unit_width[key] = v->mode == Mode::step ? v->frequency[0] : 0;
    }
    return t;
}

WC_INLINE uint32_t take_raw(uint64_t& state, Words& words, int bits) {
    const uint32_t raw = (uint32_t)(state & ((1ull << bits) - 1));
    state = rans_refill(state >> bits, words);
    return raw;
}

// A value that is not a step of one. slot: the state's low kFrequencyBits.
template <class T>
T decode_rare(T before, const ValueModel& m, const Field& field, uint64_t& state, Words& words) {
    const uint32_t slot = (uint32_t)(state & (kFrequencyTotal - 1));
    const int s = m.symbol_at(slot);
    const uint32_t width = m.frequency[s], within = slot - m.cumulative[s];
    constexpr int bits = sizeof(T) * 8;
    if (m.mode == Mode::step) {
        const bool falls = state >> kFrequencyBits & 1;
        state = rans_refill(width * (state >> (kFrequencyBits + 1)) + within, words);
        const int raw = step_raw_bits(s);
        const uint32_t step = step_base(s) + 1 + (raw ? take_raw(state, words, raw) : 0);
        return ordered((T)(ordered(before) + (T)(falls ? 0u - step : step)));
    }
    state = rans_refill(width * (state >> kFrequencyBits) + within, words);
    if (s == kEscape) {
        const uint32_t low = take_raw(state, words, bits / 2);
        return (T)(take_raw(state, words, bits / 2) << (bits / 2) | low);
    }
    // An altered stream can name an exponent below zero; the mask keeps it in the field, and the digest refuses it.
    const uint32_t exponent = ((uint32_t)m.top - (uint32_t)(s >> 1)) & ((1u << field.exponent_bits) - 1);
    const uint32_t sign = ((uint32_t)before >> (bits - 1)) ^ (uint32_t)(s & 1);
    return (T)(sign << (bits - 1) | exponent << field.mantissa_bits | take_raw(state, words, field.mantissa_bits));
}

template <class T>
void decode_values(const T* base, const uint32_t* index, T* bits, size_t n, const ValueLookup& lookup,
                   ValueStream& stream) {
    uint64_t state = stream.state, next_state = stream.next_state;
    Words words = stream.words;
    for (size_t i = 0; i < n; i++) {
        const T before = base[index[i]];
        const size_t key = before >> lookup.field.mantissa_bits;
        const uint32_t slot = (uint32_t)(state & (kFrequencyTotal - 1));
        if (WC_LIKELY(slot < lookup.unit_width[key])) {
            const T step = (T)(1 - 2 * (int)(state >> kFrequencyBits & 1));
            bits[i] = ordered((T)(ordered(before) + step));
            state = rans_refill(lookup.unit_width[key] * (state >> (kFrequencyBits + 1)) + slot, words);
        } else {
            bits[i] = decode_rare(before, *lookup.by_key[key], lookup.field, state, words);
        }
        std::swap(state, next_state);
    }
    stream = {state, next_state, words};
}

// Reads a state. Every state lies in [2^31, 2^63).
uint64_t read_state(Reader& in) {
    const uint64_t above = in.varint();
    if (above >= kStateHigh - kStateLow) in.fail(Fault::corrupt);
    return kStateLow + above;
}

struct ChunkHeader {
    Model model;
    uint64_t changes[2] = {0, 0};
    LaneDecoder lanes[2];
    std::vector<uint32_t> words;  // of all streams
    ValueStream values;
};

LaneDecoder idle_lane() { return {kStateLow, kStateLow, {nullptr, nullptr}, 0, kNever, 0, 0}; }

void read_counts(Reader& in, size_t count, uint64_t changes[2]) {
    changes[0] = in.varint();
    changes[1] = count > kSegment ? in.varint() : 0;
    if (changes[0] > count || changes[1] > count - changes[0]) in.fail(Fault::corrupt);
}

// Reads everything before the words and gives each stream its words. Nothing is allocated that the body does not fill.
void read_header(Reader& in, size_t count, ChunkHeader& h) {
    read_counts(in, count, h.changes);
    if (in.failed() || h.changes[0] + h.changes[1] == 0) return;
    h.model.read(in);
    if (in.failed()) return;
    uint64_t words[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        h.lanes[i] = idle_lane();
        if (!h.changes[i]) continue;
        h.lanes[i].state = read_state(in);
        h.lanes[i].next_state = read_state(in);
        h.lanes[i].changes_left = h.changes[i];
        words[i] = in.varint();
        if (words[i] > in.left() / 4) in.fail(Fault::truncated);
    }
    h.values.state = read_state(in);
    h.values.next_state = read_state(in);
    if (in.left() % 4 || words[0] + words[1] > in.left() / 4) in.fail(Fault::truncated);
    if (in.failed()) return;
    const size_t all = in.left() / 4;
    h.words.resize(all + 1);
    for (size_t i = 0; i < all; i++) h.words[i] = load_u32(in.at() + 4 * i);
    const uint32_t* const first = h.words.data();
    h.lanes[0].words = {first, first + words[0]};
    h.lanes[1].words = {first + words[0], first + words[0] + words[1]};
    h.values.words = {first + words[0] + words[1], first + all};
}

void start_lane(LaneDecoder& lane) {
    if (!lane.changes_left) return;
    lane.target = hazard_below(kSurvival, (uint32_t)(lane.state & kPointMask));
    lane.next_distance = hazard_below(kSurvival, (uint32_t)(lane.next_state & kPointMask));
}

// All of a stream was used, and the encoder's first states came back.
bool ended(uint64_t a, uint64_t b, const Words& words) {
    return a == kStateLow && b == kStateLow && words.at == words.end;
}

}  // namespace

Fault chunk_changes(const uint8_t* body, size_t size, size_t count, uint64_t& changes) {
    Reader in(body, body + size);
    uint64_t of[2];
    read_counts(in, count, of);
    changes = in.failed() ? 0 : of[0] + of[1];
    return in.fault();
}

template <class T>
Fault decode_chunk(const ChunkTarget<T>& target, Field field, const Kernels& kernels, const uint8_t* body,
                   size_t size) {
    Reader in(body, body + size);
    ChunkHeader h;
    h.model.field = field;
    read_header(in, target.count, h);
    if (in.failed()) return in.fault();
    if (h.changes[0] + h.changes[1] != target.changes) return Fault::corrupt;
    if (!target.changes) {
        if (target.sink) target.sink->take(target.first, target.count, target.index, target.bits, 0);
        return in.left() ? Fault::corrupt : Fault::none;
    }
    const HazardTable hazards = make_hazards(h.model);
    const ValueLookup lookup = make_lookup(h.model);
    for (LaneDecoder& lane : h.lanes) start_lane(lane);

    Scan scans[2];
    Found of[2];
    uint64_t done = 0;
    for (size_t i = 0; i < target.count; i += 2 * kSegment) {
        const size_t pair = std::min(2 * kSegment, target.count - i), first = std::min(kSegment, pair);
        kernels.scan(target.base + i, nullptr, first, hazards, scans[0]);
        kernels.scan(target.base + i + first, nullptr, pair - first, hazards, scans[1]);
        kernels.decode(h.lanes, scans, hazards, of);
        const size_t found = of[0].count + of[1].count;
        if (found > target.changes - done) return Fault::corrupt;  // keeps the writes below in the caller's arrays
        uint32_t* index = target.index + done;
        for (size_t lane = 0; lane < 2; lane++)
            for (size_t j = 0; j < of[lane].count; j++)
                *index++ = (uint32_t)(i + lane * kSegment + of[lane].positions[j]);
        index = target.index + done;
        decode_values(target.base, index, target.bits + done, found, lookup, h.values);
        for (size_t j = 0; j < found; j++) index[j] += (uint32_t)target.first;
        if (target.sink) target.sink->take(target.first + i, pair, index, target.bits + done, found);
        done += found;
    }
    if (done != target.changes) return Fault::corrupt;
    for (const LaneDecoder& lane : h.lanes)
        if (!ended(lane.state, lane.next_state, lane.words)) return Fault::corrupt;
    return ended(h.values.state, h.values.next_state, h.values.words) ? Fault::none : Fault::corrupt;
}

template Fault decode_chunk(const ChunkTarget<uint8_t>&, Field, const Kernels&, const uint8_t*, size_t);
template Fault decode_chunk(const ChunkTarget<uint16_t>&, Field, const Kernels&, const uint8_t*, size_t);
template Fault decode_chunk(const ChunkTarget<uint32_t>&, Field, const Kernels&, const uint8_t*, size_t);

}  // namespace weightcast
