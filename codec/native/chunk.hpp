// One chunk of a body. The body's frame around it is in body.cpp.
#pragma once

#include "ulp.hpp"

namespace weightcast {

template <class T>
uint64_t encode_chunk(const T* base, const T* fresh, size_t count, Field field, const Kernels& kernels,
                      std::vector<uint8_t>& out);

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

// The sampled fraction of a chunk: runs of 64 weights, one in `stride`.
WC_INLINE size_t sample_stride(size_t count) {
    const size_t stride = count >> 18;
    return stride < 1 ? 1 : stride > 16 ? 16 : stride;
}

}  // namespace weightcast
