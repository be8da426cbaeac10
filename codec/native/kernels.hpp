// The loops that depend on the instruction set, chosen once at run time. All sets give the same results.
#pragma once

#include "model.hpp"
#include "rans.hpp"

namespace weightcast {

constexpr size_t kSegment = 4096;  // weights; segments go to the two lanes in turn
constexpr size_t kBlock = 256;     // weights; prefix sums start anew, so that they stay below 2^31 (256 * 7.34 bits)
constexpr size_t kBlocks = kSegment / kBlock;
constexpr size_t kMasks = kSegment / 64;

// Events of one segment: each moves the base to a later boundary between weights, of which a segment has this many.
constexpr size_t kMostEvents = kSegment + 1;

// Hazard sums within a block: sum[0] is 0, sum[i] covers the first 8 * i weights, sum[32] the whole block.
struct BlockSums {
    uint32_t sum[33];
    uint32_t total() const { return sum[32]; }
};

// What the old weights of a segment say. Past the last weight sums stay level and classes are 0.
struct Scan {
    size_t blocks;
    BlockSums sums[kBlocks];
    uint8_t classes[kSegment];
    uint64_t masks[kMasks];  // encoder only: bit i of masks[j] says whether weight 64 * j + i changes
    uint64_t dirty;          // bit j: whether masks[j] is not 0; other masks are not to be read
};
static_assert(kMasks == 64, "one bit a mask");

// An event: a change, or a skip of hazard during which nothing changes (start 0).
struct Interval {
    uint32_t start, width;
};

// An event encoder between segments. Hazards are relative to the start of the lane's next block.
struct LaneEncoder {
    int64_t base;    // hazard at the last event
    Interval* end;   // where the next event goes
    Interval* used;  // past the last change: skips after it are not coded
    bool impossible;  // a weight changed whose class has no hazard
};

// An event decoder between segments.
struct LaneDecoder {
    uint64_t state, next_state;  // they take turns, so that one's refill overlaps the other's search
    Words words;
    int64_t base;            // as in LaneEncoder
    int64_t target;          // hazard at or just below which the next event lies; kNever once all changes are decoded
    uint32_t next_distance;  // from an event to the target after it: hazard_below of next_state's point
    uint64_t changes_left;
};

constexpr int64_t kNever = INT64_MAX / 2;
constexpr uint64_t kPointMask = (1ull << kSurvivalBits) - 1;  // of a state, the point in the interval of an event

// The positions of the changed weights of a segment, ascending; the room behind them is for writing without branches.
struct Found {
    size_t count;
    uint16_t positions[kSegment + 8];
};

// Memory to ask for, block by block, while other work is done: the next segment's new weights. Its old weights are
// asked for by the scan; both at once would keep the scan waiting while memory idles later.
struct Ahead {
    const void* at;
    size_t block_bytes;
};

struct Kernels {
    // Fills `out` from count <= kSegment old weights; its masks only where the new weights are given.
    void (*scan)(const void* before, const void* after, size_t count, const HazardTable& hazards, Scan& out);
    // Bit i of masks[j]: whether weight 64 * j + i differs; (count + 63) / 64 masks, bits past count are 0.
    void (*diff)(const void* a, const void* b, size_t count, uint64_t* masks);
    // Finds the changes of one segment and appends their events. The lane has room for kMostEvents.
    void (*encode)(LaneEncoder& lane, const Scan& scan, const HazardTable& hazards, Found& found, Ahead ahead);
    // Decodes the events of one segment of each lane.
    void (*decode)(LaneDecoder lanes[2], const Scan scans[2], const HazardTable& hazards, Found found[2]);
};

// width in bytes: 1, 2 or 4.
const Kernels& portable_kernels(int width);
const Kernels& avx2_kernels(int width);
const Kernels& neon_kernels(int width);

// The fastest set this processor has, or the portable one if asked for.
const Kernels& kernels(int width, bool portable);

}  // namespace weightcast
