#include <algorithm>

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
void decode_values(const T* base, const uint32_t* index, T* bits, size_t n, const ValueLookup& lookup, ValueStream& stream) {
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
    Lane lanes[2];
    ValueStream values;
};

Lane idle_lane() { return {kStateLow, kStateLow, {nullptr, nullptr}, 0, kNever, 0, 0, 0, 0}; }

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
    for (int i = 0; i < 2; i++) {
        const uint8_t* at = in.take(words[i] * 4);
        h.lanes[i].words = {at, at + (at ? words[i] * 4 : 0)};
    }
    if (in.left() % 4) in.fail(Fault::truncated);
    h.values.words = {in.at(), in.at() + in.left()};
}

void start_lane(Lane& lane) {
    if (!lane.changes_left) return;
    lane.point = (uint32_t)(lane.state & (kStateLow - 1));
    lane.next_point = (uint32_t)(lane.next_state & (kStateLow - 1));
    lane.target = hazard_below(kSurvival, lane.point);
    lane.next_distance = hazard_below(kSurvival, lane.next_point);
}

// All of a stream was used, and the encoder's first states came back.
bool ended(uint64_t a, uint64_t b, const Words& words) { return a == kStateLow && b == kStateLow && words.at == words.end; }

// The weights of a segment for the event decoder: in place where whole groups of 8 can be read, otherwise copied.
template <class T>
const T* readable(const T* weights, size_t count, T* copy) {
    if (count % 8 == 0) return weights;
    std::copy(weights, weights + count, copy);
    std::fill(copy + count, copy + (count + 7) / 8 * 8, (T)0);
    return copy;
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
Fault decode_chunk(const ChunkTarget<T>& target, Field field, const Kernels& kernels, const uint8_t* body, size_t size) {
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
    for (Lane& lane : h.lanes) start_lane(lane);

    BlockSums sums[2][kBlocks];
    uint16_t positions[2][kSegment + 1];
    T copy[kSegment];
    uint64_t done = 0;
    for (size_t i = 0; i < target.count; i += 2 * kSegment) {
        const size_t pair = std::min(2 * kSegment, target.count - i);
        LaneSegment segments[2];
        for (size_t lane = 0; lane < 2; lane++) {
            const size_t from = std::min(lane * kSegment, pair), n = std::min(pair - from, kSegment);
            const T* weights = readable(target.base + i + from, n, copy);  // at most one of the two is copied: the last
            kernels.scan(weights, n, hazards, sums[lane]);
            segments[lane] = {weights, sums[lane], (n + kBlock - 1) / kBlock, positions[lane], 0};
        }
        kernels.decode(h.lanes, segments, hazards);
        const size_t found = segments[0].found + segments[1].found;
        if (found > target.changes - done) return Fault::corrupt;  // keeps the writes below in the caller's arrays
        uint32_t* index = target.index + done;
        for (size_t lane = 0; lane < 2; lane++)
            for (size_t j = 0; j < segments[lane].found; j++) *index++ = (uint32_t)(i + lane * kSegment + positions[lane][j]);
        index = target.index + done;
        decode_values(target.base, index, target.bits + done, found, lookup, h.values);
        for (size_t j = 0; j < found; j++) index[j] += (uint32_t)target.first;
        if (target.sink) target.sink->take(target.first + i, pair, index, target.bits + done, found);
        done += found;
    }
    if (done != target.changes) return Fault::corrupt;
    for (const Lane& lane : h.lanes)
        if (!ended(lane.state, lane.next_state, lane.words)) return Fault::corrupt;
    return ended(h.values.state, h.values.next_state, h.values.words) ? Fault::none : Fault::corrupt;
}

template Fault decode_chunk(const ChunkTarget<uint8_t>&, Field, const Kernels&, const uint8_t*, size_t);
template Fault decode_chunk(const ChunkTarget<uint16_t>&, Field, const Kernels&, const uint8_t*, size_t);
template Fault decode_chunk(const ChunkTarget<uint32_t>&, Field, const Kernels&, const uint8_t*, size_t);

}  // namespace weightcast
