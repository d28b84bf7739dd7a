// The threads of a decoder, and how they share work.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace kvrelay {

INLINE void pause() {
#ifdef __AVX2__
    _mm_pause();
#endif
}

// A fixed team that runs one function at a time on all its threads, the caller's being thread 0.
class Team {
   public:
    explicit Team(int size) : size_(size) {
        try {
            for (int thread = 1; thread < size; thread++) threads_.emplace_back([this, thread] { serve(thread); });
        } catch (...) {  // no more threads are to be had
            end();
            throw;
        }
    }
    ~Team() { end(); }
    int size() const { return size_; }

    template <class F>
    void run(F&& work) {
        work_ = [](void* f, int thread) { (*static_cast<std::remove_reference_t<F>*>(f))(thread); };
        argument_ = &work;
        next_.store(0, std::memory_order_relaxed);
        begin();
        work(0);
        meet();
    }

    // Every thread calls this at the end of a phase; the last one to come resets the task counter.
    void meet() {
        if (size_ == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        uint32_t round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            round_.notify_all();
        } else {
            await(round_, round);
        }
    }

    // One task after another, each by whichever thread is free.
    template <class F>
    void share(int num_tasks, F&& task) {
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) task(i);
        meet();
    }
    // The same, task(i, j) being told which task j this thread does next (num_tasks: none).
    template <class F>
    void share_ahead(int num_tasks, F&& task) {
        int i = next_.fetch_add(1, std::memory_order_relaxed);
        while (i < num_tasks) {
            int j = std::min(num_tasks, next_.fetch_add(1, std::memory_order_relaxed));
            task(i, j);
            i = j;
        }
        meet();
    }

    // work(r) for every row, a few rows a task.
    template <class F>
    void share_rows(int rows, F&& work) {
        int grain = std::max(1, std::min(16, rows / (2 * size_)));
        share((rows + grain - 1) / grain, [&](int task) {
            for (int r = task * grain; r < std::min(rows, (task + 1) * grain); r++) work(r);
        });
    }

   private:
    static void await(std::atomic<uint32_t>& value, uint32_t old) {
        for (int spin = 0; spin < 4000; spin++) {
            if (value.load(std::memory_order_acquire) != old) return;
            pause();
        }
        while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
    }
    void end() {
        stopping_ = true;
        begin();
        for (auto& thread : threads_) thread.join();
    }
    void begin() {
        started_.fetch_add(1, std::memory_order_release);
        started_.notify_all();
    }
    void serve(int thread) {
        for (uint32_t seen = 0;; seen++) {
            await(started_, seen);
            if (stopping_) return;
            work_(argument_, thread);
            meet();
        }
    }

    const int size_;
    std::vector<std::thread> threads_;
    std::atomic<bool> stopping_{false};
    void (*work_)(void*, int) = nullptr;
    void* argument_ = nullptr;
    alignas(64) std::atomic<uint32_t> started_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

}  // namespace kvrelay
