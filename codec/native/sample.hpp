// What is looked at before a body is coded: runs of weights all over it, counted by exponent. A chunk's model comes from
// them, and how large chunks are.
#pragma once

#include "estimate.hpp"
#include "kernels.hpp"

namespace weightcast {

// log2 of the weights in the largest chunk of the format, and in the smallest that is chosen.
constexpr int kLargestChunk = 24;
constexpr int kSmallestChosen = 19;

// A part of a body with a sample of its own: the smallest chunk that is chosen.
constexpr size_t kPart = (size_t)1 << kSmallestChosen;

// Of how many weights one is looked at, in `count` of them: a power of two.
size_t sample_stride(size_t count);

// Looks at one weight in `stride` of [first, first + count), arrays of a body that `first` counts from.
template <class T>
Sample take_sample(const T* base, const T* fresh, size_t first, size_t count, size_t stride, Field field,
                   const Kernels& kernels);

// The samples of a body's parts.
struct Survey {
    size_t stride;
    std::vector<Sample> parts;

    Sample sum(size_t first, size_t count) const;  // of a run of whole parts, or to the end
};

template <class T>
Survey take_survey(const T* base, const T* fresh, size_t count, Field field, const Kernels& kernels);

// log2 of the weights in a chunk.
int choose_chunk(const Survey& survey);

}  // namespace weightcast
