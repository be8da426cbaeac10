// An array that grows without being cleared, for writing through a bare pointer.
#pragma once

#include <cstdlib>
#include <new>

#include "common.hpp"

namespace weightcast {

template <class T>
class Buffer {
  public:
    Buffer() = default;
    ~Buffer() { std::free(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    T* data() { return data_; }
    T* end() { return data_ + size_; }
    size_t size() const { return size_; }
    size_t bytes() const { return room_ * sizeof(T); }
    T& operator[](size_t i) { return data_[i]; }

    void clear() { size_ = 0; }

    // Makes room for `more` elements past the end.
    void reserve(size_t more) {
        if (size_ + more <= room_) return;
        room_ = size_ + more + room_ / 2;
        void* moved = std::realloc((void*)data_, room_ * sizeof(T));
        if (!moved) throw std::bad_alloc();
        data_ = (T*)moved;
    }

    // Takes what was written up to `end`, within the room.
    void set_end(T* end) { size_ = (size_t)(end - data_); }

  private:
    T* data_ = nullptr;
    size_t size_ = 0, room_ = 0;
};

}  // namespace weightcast
