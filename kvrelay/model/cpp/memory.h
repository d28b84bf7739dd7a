// Memory for weights and for what a step computes.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace kvrelay {

// A vector that starts with a cache line, so that no load of a register crosses two.
template <class X>
struct LineAllocator {
    typedef X value_type;
    LineAllocator() = default;
    template <class Y>
    LineAllocator(const LineAllocator<Y>&) {}
    X* allocate(size_t count) { return static_cast<X*>(::operator new(count * sizeof(X), std::align_val_t(64))); }
    void deallocate(X* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    bool operator==(const LineAllocator&) const { return true; }
};
template <class X>
using Buffer = std::vector<X, LineAllocator<X>>;

// The old contents are gone then: no copy of them is made, nor room for both taken.
template <class X>
void make_room(Buffer<X>& buffer, size_t size) {
    if (buffer.size() >= size) return;
    buffer = Buffer<X>();
    buffer.resize(size);
}

constexpr size_t LARGE_PAGE = 2 << 20;

// Pages of its own, large ones where the system gives them; zero at first.
class Memory {
   public:
    explicit Memory(size_t bytes) : bytes_(bytes + LARGE_PAGE) {
        mapped_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped_ == MAP_FAILED) throw std::bad_alloc();
        data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(mapped_) + LARGE_PAGE - 1) & -LARGE_PAGE);
        madvise(data_, bytes, MADV_HUGEPAGE);
    }
    Memory(const Memory&) = delete;
    ~Memory() { munmap(mapped_, bytes_); }
    uint8_t* data() const { return data_; }

   private:
    void* mapped_;
    size_t bytes_;
    uint8_t* data_;
};

// Hands out memory that stays until the arena goes. What is never touched costs nothing.
class Arena {
   public:
    uint8_t* take(size_t bytes) {
        bytes = (bytes + 63) & ~size_t(63);
        if (bytes > left_) {
            left_ = std::max(bytes, size_t(64) << 20);
            pieces_.push_back(std::make_unique<Memory>(left_));
            next_ = pieces_.back()->data();
        }
        left_ -= bytes;
        return std::exchange(next_, next_ + bytes);
    }

   private:
    std::vector<std::unique_ptr<Memory>> pieces_;
    uint8_t* next_ = nullptr;
    size_t left_ = 0;
};

}  // namespace kvrelay
