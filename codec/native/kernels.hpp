// The loops that depend on the instruction set, chosen once at run time. All sets give the same results.
#pragma once

#include "model.hpp"
#include "rans.hpp"

namespace weightcast {

constexpr size_t kSegment = 4096;  // weights; segments go to the two lanes in turn
constexpr size_t kBlock = 256;     // weights; prefix sums start anew, so that they stay below 2^31 (256 * 7.34 bits)
constexpr size_t kBlocks = kSegment / kBlock;
constexpr size_t kMasks = kSegment / 64;

// Hazard sums within a block: sum[0] is 0, sum[i] covers the first 8 * i weights, sum[32] the whole block.
struct BlockSums {
    uint32_t sum[33];
    uint32_t total() const { return sum[32]; }
};

// One of the two event decoders of a chunk, between segments. Hazards are relative to the start of the next block.
struct Lane {
    uint64_t state, next_state;  // they take turns, so that one's refill overlaps the other's search
    Words words;
    int64_t base;    // hazard at the last event
    int64_t target;  // hazard at or just below which the next event lies; kNever once all changes are decoded
    uint32_t point, next_point;  // the states' low 31 bits
    uint32_t next_distance;      // of next_point, as hazard_below gives it
    uint64_t changes_left;
};

constexpr int64_t kNever = INT64_MAX / 2;

// What one lane decodes in one call: positions of changed weights within the segment, ascending.
struct LaneSegment {
    const void* weights;   // readable up to a multiple of 8 weights
    const BlockSums* sums;
    size_t blocks;
    uint16_t* positions;   // room for kSegment
    size_t found;          // out
};

struct Kernels {
    // Fills sums of (count + 255) / 256 blocks, count <= kSegment.
    void (*scan)(const void* weights, size_t count, const HazardTable& hazards, BlockSums* sums);
    // Bit i of masks[j]: whether weight 64 * j + i differs; count <= kSegment, bits past count are 0.
    void (*diff)(const void* a, const void* b, size_t count, uint64_t* masks);
    // Decodes the events of one segment of each lane.
    void (*decode)(Lane lanes[2], LaneSegment segments[2], const HazardTable& hazards);
};

// width in bytes: 1, 2 or 4.
const Kernels& portable_kernels(int width);
const Kernels& avx2_kernels(int width);

// The fastest set this processor has, or the portable one if asked for.
const Kernels& kernels(int width, bool portable);

}  // namespace weightcast
