// One chunk of a body. The body's frame around it is in body.cpp.
#pragma once

#include "ulp.hpp"
#include "values.hpp"

namespace weightcast {

// The events of a lane so far, and the hazard at the last one relative to the lane's next block.
struct LaneEvents {
    Buffer<Interval> events;
    int64_t base = 0;
    size_t used = 0;  // events up to the last change: skips after it are not coded
};

// Memory that an encoder takes along from chunk to chunk, and that is kept for the next call (spares.hpp).
template <class T>
struct Workspace {
    LaneEvents lanes[2];
    Changes<T> changes;
    Buffer<uint32_t> words;  // of the values; those of a lane lie over its events

    size_t bytes() const {
        return lanes[0].events.bytes() + lanes[1].events.bytes() + changes.before.bytes() + changes.after.bytes() +
               words.bytes();
    }

    void clear() {
        for (LaneEvents& lane : lanes) lane.events.clear(), lane.base = 0, lane.used = 0;
        changes.before.clear();
        changes.after.clear();
    }
};

// What follows an encoder through its two arrays, to their ends.
struct Trails {
    Trail base, fresh;
    void reach(const void* base_end, const void* fresh_end) {
        base.reach(base_end);
        fresh.reach(fresh_end);
    }
};

// Appends the chunk. Throws ArraysChanged.
template <class T>
Counted encode_chunk(const T* base, const T* fresh, size_t count, Field field, const Sample& sample,
                     const Kernels& kernels, Workspace<T>& work, Trails& trails, std::vector<uint8_t>& out);

// How many of a chunk's weights change, from its first bytes.
Fault chunk_changes(const uint8_t* body, size_t size, size_t count, uint64_t& changes);

// A chunk's place in memory and in the result; `first` is the absolute index of its first weight.
template <class T>
struct ChunkTarget {
    const T* base;
    size_t count, first;
    uint32_t* index;
    T* bits;
    uint64_t changes;
    Sink* sink;
};

template <class T>
Fault decode_chunk(const ChunkTarget<T>& target, Field field, const Kernels& kernels, const uint8_t* body, size_t size);

}  // namespace weightcast
