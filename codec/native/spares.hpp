// Working memory that is kept from one call to the next: where pages are fresh, touching them first costs as much as the
// work done in them, and more so with several threads, whom the kernel serves one at a time.
#pragma once

#include <atomic>
#include <memory>

#include "common.hpp"

namespace weightcast {

// What all kept memory of the process comes to at most; what would exceed it is freed.
constexpr size_t kKeptBytes = (size_t)64 << 20;
constexpr size_t kKeptItems = 64;

inline std::atomic<size_t> kept_bytes{0};

// Holds a W for as long as it lives: one that somebody has given back, or a new one. W says its size by bytes().
//
// Belongs to no thread, because threads come and go. Nobody waits, and no lock is held that a forked child could find
// taken. What is kept at the end of the process is left to it: a thread may still be running.
template <class W>
class Spare {
  public:
    Spare() {
        for (std::atomic<W*>& place : kept_) {
            if (!place.load(std::memory_order_relaxed)) continue;
            held_.reset(place.exchange(nullptr, std::memory_order_acquire));
            if (!held_) continue;
            kept_bytes -= held_->bytes();
            return;
        }
        held_.reset(new W);
    }

    ~Spare() {
        const size_t bytes = held_->bytes();
        size_t kept = kept_bytes;
        do {
            if (kept + bytes > kKeptBytes) return;
        } while (!kept_bytes.compare_exchange_weak(kept, kept + bytes));
        for (std::atomic<W*>& place : kept_) {
            W* none = nullptr;
            if (!place.compare_exchange_strong(none, held_.get(), std::memory_order_release)) continue;
            (void)held_.release();
            return;
        }
        kept_bytes -= bytes;
    }

    Spare(const Spare&) = delete;
    Spare& operator=(const Spare&) = delete;

    W& operator*() { return *held_; }

  private:
    std::unique_ptr<W> held_;

    inline static std::atomic<W*> kept_[kKeptItems] = {};
};

}  // namespace weightcast
