// The coder of change events, compiled once per instruction set inside that set's namespace, which has to provide
//   Lookup, make_lookup(hazards)            the hazards of the classes, ready for
//   group_edges(classes, lookup, low, edge)  edge[i] = low + the hazards of the first i of 8 weights, i <= 8
//   locate(classes, lookup, low, target, edge)  the same, and how many of edge[1..8] are <= target (fewer than 8)
//   groups_at_most(sums, target)            how many of 32 ascending sums are <= target
// and nothing that the linker could merge with another set's copy (see common.hpp). edges.inl has the two in the middle
// without vectors.

// The last boundary between weights at or before `limit`, a hazard in this block that the block's total exceeds.
WC_INLINE uint32_t boundary_at_most(const BlockSums& sums, const uint8_t* classes, const Lookup& k, uint32_t limit) {
    const size_t group = groups_at_most(sums.sum + 1, limit);
    uint32_t edge[9];
    return edge[locate(classes + 8 * group, k, sums.sum[group], limit, edge)];
}

// Codes skips until `hazard` is within reach of the base.
WC_INLINE void skip_to(int64_t hazard, const BlockSums& sums, const uint8_t* classes, const Lookup& k, int64_t& base,
                       Interval*& end) {
    while (WC_UNLIKELY(hazard - base > (int64_t)kHazardLimit)) {
        // Not negative: at the end of the previous block the base was within reach of that block's end.
        const uint32_t edge = boundary_at_most(sums, classes, k, (uint32_t)(base + (int64_t)kHazardLimit));
        *end++ = {0, survival(kSurvival, (uint32_t)((int64_t)edge - base))};
        base = edge;
    }
}

// The set bits of the masks. Four are written at once: a loop that ends after one or two would be mispredicted.
WC_INLINE void list_changes(const Scan& scan, Found& found) {
    uint16_t* out = found.positions;
    for (uint64_t d = scan.dirty; d; d &= d - 1) {
        const size_t i = (size_t)lowest_bit(d);
        uint64_t m = scan.masks[i];
        uint16_t* const end = out + bit_count(m);
        for (size_t j = 0; j < 4; j++, m &= m - 1) out[j] = (uint16_t)(i * 64 + (size_t)lowest_bit(m | 1ull << 63));
        for (out += 4; out < end; out++, m &= m - 1) *out = (uint16_t)(i * 64 + (size_t)lowest_bit(m));
        out = end;
    }
    found.count = (size_t)(out - found.positions);
}

// From this many changes in a block on, the edges of all its groups are had first, not those of each change's group.
constexpr size_t kManyChanges = kBlock / 4;

static void encode_lane(LaneEncoder& lane, const Scan& scan, const HazardTable& hazards, Found& found, Ahead ahead) {
    const Lookup k = make_lookup(hazards);
    list_changes(scan, found);
    const uint16_t *at = found.positions, *const stop = at + found.count;
    int64_t base = lane.base;
    Interval *end = lane.end, *used = lane.used;
    bool impossible = lane.impossible;
    for (size_t b = 0; b < scan.blocks; b++) {
        for (size_t line = 0; line < ahead.block_bytes; line += 64) prefetch(ahead.at, b * ahead.block_bytes + line);
        const BlockSums& sums = scan.sums[b];
        const uint8_t* classes = scan.classes + b * kBlock;
        const size_t first = b * kBlock, past = first + kBlock;
        const auto put = [&](const uint32_t edge[2]) {
            const int64_t low = edge[0], high = edge[1];
            skip_to(high, sums, classes, k, base, end);
            const uint32_t below = survival(kSurvival, (uint32_t)(high - base));
            *end++ = {below, survival(kSurvival, (uint32_t)(low - base)) - below};
            impossible |= low == high;
            base = high;
        };
        const uint16_t* const before = at;
        if ((size_t)(stop - at) > kManyChanges && at[kManyChanges] < past) {
            uint32_t edges[kBlock + 1];
            for (size_t g = 0; g < kBlock / 8; g++) group_edges(classes + 8 * g, k, sums.sum[g], edges + 8 * g);
            for (; at < stop && *at < past; at++) put(edges + (*at - first));
        } else {
            for (; at < stop && *at < past; at++) {
                const size_t group = (*at - first) / 8;
                uint32_t edge[9];
                group_edges(classes + 8 * group, k, sums.sum[group], edge);
                put(edge + (*at & 7));
            }
        }
        if (at > before) used = end;
        skip_to(sums.total(), sums, classes, k, base, end);
        base -= sums.total();
    }
    lane = {base, end, used, impossible};
}

// A decoder in one segment; a local copy, so that the compiler keeps it in registers.
struct Cursor {
    LaneDecoder lane;
    const BlockSums *sums, *sums_end;
    const uint8_t *classes, *first_class;  // of the block of `sums`; of the segment
    uint16_t* positions;
};

WC_INLINE Cursor open_cursor(const LaneDecoder& lane, const Scan& s, Found& found) {
    return {lane, s.sums, s.sums + s.blocks, s.classes, s.classes, found.positions};
}

// Moves to the block in which the target lies; false at the end of the segment.
WC_INLINE bool seek(Cursor& c) {
    while (c.sums < c.sums_end) {
        const int64_t total = c.sums->total();
        if (c.lane.target < total) return true;
        c.lane.target -= total;
        c.lane.base -= total;
        c.sums++;
        c.classes += kBlock;
    }
    return false;
}

// Leaves the interval [below, above) that the state's point lies in, for the boundary `base`, and changes states.
// The state stays at least 1 and below 2^63.
WC_INLINE void take_interval(LaneDecoder& lane, uint32_t below, uint32_t above, int64_t base) {
    const uint32_t point = (uint32_t)(lane.state & kPointMask);
    const uint64_t left = (uint64_t)(above - below) * (lane.state >> kSurvivalBits) + (point - below);
    const uint64_t next = rans_refill(left, lane.words);
    lane.state = lane.next_state;
    lane.next_state = next;
    lane.base = base;
    lane.target = base + lane.next_distance;
    lane.next_distance = hazard_below(kSurvival, (uint32_t)(next & kPointMask));
}

// Decodes one event: a change, or a skip. Requires seek().
//
// Bounds, for any stream: base <= target < total, and target - base <= kHazardLimit. The boundary `low` at or before
// the target is at or after the base, which is a boundary itself; so every survival() is in its domain. A change
// moves the base to `high` > target; a skip moves it to `low`, which is above the base, because no hazard reaches
// kHazardLimit. So positions ascend strictly, at most kSegment are found, and each call ends.
WC_INLINE void decode_event(Cursor& c, const Lookup& k) {
    LaneDecoder& lane = c.lane;
    const uint32_t target = (uint32_t)lane.target;
    const size_t group = groups_at_most(c.sums->sum + 1, target);  // < 32: the last sum is the total
    const uint8_t* classes = c.classes + 8 * group;
    uint32_t edge[9];
    const size_t inside = locate(classes, k, c.sums->sum[group], target, edge);
    const uint32_t low = edge[inside], high = edge[inside + 1];
    const uint32_t above = survival(kSurvival, (uint32_t)((int64_t)low - lane.base));
    const int64_t reach = (int64_t)high - lane.base;
    if (WC_UNLIKELY(reach > (int64_t)kHazardLimit)) return take_interval(lane, 0, above, low);
    const uint32_t below = survival(kSurvival, (uint32_t)reach);
    const uint32_t point = (uint32_t)(lane.state & kPointMask);
    if (WC_UNLIKELY(below > point)) {  // hazard_below was a few units low, and a boundary lies between
        lane.target = lane.base + exact_hazard(point);
        return;
    }
    *c.positions++ = (uint16_t)(classes + inside - c.first_class);
    take_interval(lane, below, above, high);
    if (WC_UNLIKELY(--lane.changes_left == 0)) lane.target = kNever;
}

static void decode_lanes(LaneDecoder lanes[2], const Scan scans[2], const HazardTable& hazards, Found found[2]) {
    const Lookup k = make_lookup(hazards);
    Cursor a = open_cursor(lanes[0], scans[0], found[0]), b = open_cursor(lanes[1], scans[1], found[1]);
    // An event waits on a chain of some 50 cycles; two lanes side by side hide most of it.
    while (seek(a) && seek(b)) {
        decode_event(a, k);
        decode_event(b, k);
    }
    while (seek(a)) decode_event(a, k);
    while (seek(b)) decode_event(b, k);
    found[0].count = (size_t)(a.positions - found[0].positions);
    found[1].count = (size_t)(b.positions - found[1].positions);
    lanes[0] = a.lane;
    lanes[1] = b.lane;
}
