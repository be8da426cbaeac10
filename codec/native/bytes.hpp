// Reading and writing the small parts of a body: bytes, varints, and bit fields (least significant bit first).
#pragma once

#include <vector>

#include "common.hpp"

namespace weightcast {

// Why a body was refused. Truncated: it ends before its own lengths say so. Unsupported: a later format.
enum class Fault { none, truncated, corrupt, unsupported };

class Writer {
  public:
    explicit Writer(std::vector<uint8_t>& out) : out_(out) {}

    void byte(uint8_t v) { out_.push_back(v); }

    void varint(uint64_t v) {
        for (; v > 127; v >>= 7) out_.push_back((uint8_t)(v | 128));
        out_.push_back((uint8_t)v);
    }

    void bits(uint32_t v, int count) {
        pending_ |= (uint64_t)v << filled_;
        for (filled_ += count; filled_ >= 8; filled_ -= 8, pending_ >>= 8) out_.push_back((uint8_t)pending_);
    }

    // Elias gamma of v >= 1: as many zeros as v has bits after its first, then v from that first bit down.
    void gamma(uint32_t v) {
        const int below = floor_log2(v);
        bits(0, below);
        bits(1, 1);
        bits(v & ((1u << below) - 1), below);
    }

    void align() {
        if (filled_) bits(0, 8 - filled_);
    }

  private:
    std::vector<uint8_t>& out_;
    uint64_t pending_ = 0;
    int filled_ = 0;
};

// Never reads past `end`; the first problem sticks in `fault` and everything read after it is zero.
class Reader {
  public:
    Reader(const uint8_t* begin, const uint8_t* end) : at_(begin), end_(end) {}

    Fault fault() const { return fault_; }
    bool failed() const { return fault_ != Fault::none; }
    const uint8_t* at() const { return at_; }
    size_t left() const { return (size_t)(end_ - at_); }

    void fail(Fault why) {
        if (fault_ == Fault::none) fault_ = why;
        at_ = end_;
    }

    uint8_t byte() {
        if (at_ == end_) {
            fail(Fault::truncated);
            return 0;
        }
        return *at_++;
    }

    // At most 63 bits, in the shortest form only, so that one value has one encoding.
    uint64_t varint() {
        uint64_t v = 0;
        for (int shift = 0; shift < 63; shift += 7) {
            const uint8_t b = byte();
            v |= (uint64_t)(b & 127) << shift;
            if (!(b & 128)) {
                if (shift && !b) fail(Fault::corrupt);
                return failed() ? 0 : v;
            }
        }
        fail(Fault::corrupt);
        return 0;
    }

    uint32_t bits(int count) {
        while (filled_ < count) {
            pending_ |= (uint64_t)byte() << filled_;
            filled_ += 8;
        }
        const uint32_t v = (uint32_t)(pending_ & ((1ull << count) - 1));
        pending_ >>= count;
        filled_ -= count;
        return v;
    }

    // Values below 2^(most + 1).
    uint32_t gamma(int most) {
        int below = 0;
        while (!bits(1)) {
            if (++below > most) {
                fail(Fault::corrupt);
                return 1;
            }
        }
        return 1u << below | bits(below);
    }

    // Skips to the next byte; the bits skipped must be zero.
    void align() {
        if (pending_) fail(Fault::corrupt);
        pending_ = 0;
        filled_ = 0;
    }

    const uint8_t* take(size_t count) {
        if (left() < count) {
            fail(Fault::truncated);
            return nullptr;
        }
        const uint8_t* p = at_;
        at_ += count;
        return p;
    }

  private:
    const uint8_t* at_;
    const uint8_t* end_;
    uint64_t pending_ = 0;
    int filled_ = 0;
    Fault fault_ = Fault::none;
};

}  // namespace weightcast
