// The decoder of change events, compiled once per instruction set inside that set's namespace, which has to provide
//   size_t groups_at_most(const uint32_t sums[32], uint32_t target)   // how many of 32 ascending sums are <= target
// and nothing that the linker could merge with another set's copy (see common.hpp).

// The cursor of one lane in one segment; a local copy, so that the compiler keeps it in registers.
template <class T>
struct Cursor {
    Lane lane;
    const T* weights;
    const BlockSums* sums;
    size_t block, blocks;
    uint16_t* positions;
};

template <class T>
WC_INLINE Cursor<T> open_cursor(const Lane& lane, const LaneSegment& s) {
    return {lane, (const T*)s.weights, s.sums, 0, s.blocks, s.positions};
}

// Moves to the block in which the target lies; false at the end of the segment.
template <class T>
WC_INLINE bool seek(Cursor<T>& c) {
    while (c.block < c.blocks) {
        const int64_t total = c.sums[c.block].total();
        if (c.lane.target < total) return true;
        c.lane.target -= total;
        c.lane.base -= total;
        c.block++;
    }
    return false;
}

// Decodes one event: a change, or a skip of 10 bits of hazard. Requires seek().
//
// Bounds, for any stream: base <= target < total, base is a boundary between weights and never falls, so that the
// boundary `low` at or below the target is in [base, target] and target - base <= kHazardLimit keeps every survival()
// in its domain. A change moves base to `high` > target; a skip moves it to `low`, above base, because no weight's hazard
// reaches kHazardLimit. So positions ascend strictly and each call ends.
template <class T>
WC_INLINE void decode_event(Cursor<T>& c, const HazardTable& hazards) {
    const SurvivalTables& tables = kSurvival;
    Lane& lane = c.lane;
    const uint32_t* sums = c.sums[c.block].sum;
    const uint32_t target = (uint32_t)lane.target;
    const size_t group = groups_at_most(sums + 1, target);  // < 32: the last sum is the total, above the target
    const T* w = c.weights + c.block * kBlock + group * 8;
    const int shift = hazards.field.mantissa_bits;
    uint32_t low = sums[group], high = sums[group + 1], edge = low;
    uint32_t inside = 0;
    for (int i = 0; i < 7; i++) {  // the last edge is `high`
        edge += hazards.by_key[w[i] >> shift];
        const bool before = edge <= target;
        inside += before;
        low = before ? edge : low;
        high = before ? high : (edge < high ? edge : high);
    }
    const uint32_t from = (uint32_t)((int64_t)low - lane.base);
    const int64_t to = (int64_t)high - lane.base;
    const bool skip = to > (int64_t)kHazardLimit;
    const uint32_t above = survival(tables, from);
    const uint32_t below = skip ? 0 : survival(tables, (uint32_t)to);
    if (WC_UNLIKELY(below > lane.point)) {  // hazard_below was low by a unit or two, and a boundary lies between
        lane.target = lane.base + exact_hazard(lane.point);
        return;
    }
    *c.positions = (uint16_t)(c.block * kBlock + group * 8 + inside);
    c.positions += !skip;
    lane.base = skip ? low : high;
    // above > point >= below: the state stays at least 1 and below 2^63.
    const uint64_t next = rans_refill((uint64_t)(above - below) * (lane.state >> kSurvivalBits) + lane.point - below, lane.words);
    lane.state = lane.next_state;
    lane.next_state = next;
    lane.point = lane.next_point;
    lane.next_point = (uint32_t)(next & (kStateLow - 1));
    lane.target = lane.base + lane.next_distance;
    lane.next_distance = hazard_below(tables, lane.next_point);
    lane.changes_left -= !skip;
    if (WC_UNLIKELY(lane.changes_left == 0)) lane.target = kNever;
}

template <class T>
void decode_lanes(Lane lanes[2], LaneSegment segments[2], const HazardTable& hazards) {
    Cursor<T> a = open_cursor<T>(lanes[0], segments[0]);
    Cursor<T> b = open_cursor<T>(lanes[1], segments[1]);
    // An event waits on a chain of some 50 cycles; two lanes side by side hide most of it.
    while (seek(a) && seek(b)) {
        decode_event(a, hazards);
        decode_event(b, hazards);
    }
    while (seek(a)) decode_event(a, hazards);
    while (seek(b)) decode_event(b, hazards);
    segments[0].found = (size_t)(a.positions - segments[0].positions);
    segments[1].found = (size_t)(b.positions - segments[1].positions);
    lanes[0] = a.lane;
    lanes[1] = b.lane;
}
