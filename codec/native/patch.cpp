#include "patch.hpp"

#include <algorithm>

namespace weightcast {
namespace {

constexpr size_t kTile = 16384;  // weights: two segments are 8192

template <class T>
void store(void* buffer, size_t from, const uint32_t* index, const void* bits, size_t changes) {
    T* to = (T*)buffer;
    const T* values = (const T*)bits;
    for (size_t i = 0; i < changes; i++) to[index[i] - from] = values[i];
}

void store(void* buffer, size_t from, size_t width, const uint32_t* index, const void* bits, size_t changes) {
    if (width == 1)
        store<uint8_t>(buffer, from, index, bits, changes);
    else if (width == 2)
        store<uint16_t>(buffer, from, index, bits, changes);
    else if (width == 4)
        store<uint32_t>(buffer, from, index, bits, changes);
    else
        store<uint64_t>(buffer, from, index, bits, changes);
}

bool ascends_below(const uint32_t* index, size_t changes, size_t count) {
    bool ascends = true;
    for (size_t i = 1; i < changes; i++) ascends &= index[i - 1] < index[i];
    return ascends && (!changes || index[changes - 1] < count);
}

uint64_t count_words(const uint64_t* a, const uint64_t* b, size_t count) {
    uint64_t n = 0;
    for (size_t i = 0; i < count; i++) n += a[i] != b[i];
    return n;
}

}  // namespace

uint64_t count_changed(const void* a, const void* b, size_t count, int width) {
    if (width == 8) return count_words((const uint64_t*)a, (const uint64_t*)b, count);
    const Kernels& k = kernels(width, false);
    uint64_t masks[kMasks] = {};
    uint64_t changed = 0;
    for (size_t i = 0; i < count; i += kSegment) {
        const size_t here = std::min(kSegment, count - i), bytes = i * (size_t)width;
        for (size_t line = 0; line < kSegment * (size_t)width; line += 64) {
            prefetch(a, bytes + kSegment * (size_t)width + line);
            prefetch(b, bytes + kSegment * (size_t)width + line);
        }
        k.diff((const uint8_t*)a + bytes, (const uint8_t*)b + bytes, here, masks);
        for (size_t j = 0; j < (here + 63) / 64; j++) changed += (uint64_t)bit_count(masks[j]);
    }
    return changed;
}

bool scatter(void* buffer, size_t count, int width, const uint32_t* index, const void* bits, size_t changes) {
    if (!ascends_below(index, changes, count)) return false;
    // Hardly two changes share a line of a large buffer: what the next ones need is asked for first.
    constexpr size_t kBatch = 32;
    const size_t size = (size_t)width;
    for (size_t i = 0; i < changes; i += kBatch) {
        const size_t here = std::min(kBatch, changes - i), next = std::min(kBatch, changes - i - here);
        for (size_t j = i + here; j < i + here + next; j++) prefetch(buffer, index[j] * size);
        store(buffer, 0, size, index + i, (const uint8_t*)bits + i * size, here);
    }
    return true;
}

Patched::Patched(const void* base, int width, Digests& digests)
    : base_((const uint8_t*)base), width_((size_t)width), digests_(digests), tile_(kTile * (size_t)width) {}

void Patched::take(size_t from, size_t n, const uint32_t* index, const void* bits, size_t changes) {
    const uint8_t* part = base_ + from * width_;
    if (digests_.of_base) digests_.of_base->update(part, n * width_);
    if (!digests_.of_result) return;
    if (changes) {
        std::memcpy(tile_.data(), part, n * width_);
        store(tile_.data(), from, width_, index, bits, changes);
        part = tile_.data();
    }
    digests_.of_result->update(part, n * width_);
}

bool digest_patched(const void* base, size_t count, int width, const uint32_t* index, const void* bits, size_t changes,
                    Digests& digests) {
    if (!ascends_below(index, changes, count)) return false;
    Patched patched(base, width, digests);
    const uint32_t* at = index;
    for (size_t from = 0; from < count; from += kTile) {
        const size_t n = std::min(kTile, count - from);
        const uint32_t* next = std::lower_bound(at, index + changes, from + n);
        patched.take(from, n, at, (const uint8_t*)bits + (size_t)(at - index) * (size_t)width, (size_t)(next - at));
        at = next;
    }
    return true;
}

void digest_both(const void* base, size_t base_size, const void* result, size_t size, Digests& digests) {
    if (digests.of_base) digests.of_base->update(base, base_size);
    if (digests.of_result) digests.of_result->update(result, size);
}

}  // namespace weightcast
