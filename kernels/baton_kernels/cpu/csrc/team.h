// Teams of threads, and memory that each of them works in. The threads are those of the OpenMP runtime that torch has
// loaded, so that there is one pool of threads and not two. Its functions are called by their names in the binary
// interface, which GNU's runtime, LLVM's and Intel's all have: no compiler has to know OpenMP, and the symbols stay open
// until the library is loaded, which fails where there is no such runtime. As with torch, a process that was forked after
// a team had run must not run another; within a team, a team is one thread.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>

extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
void GOMP_barrier();
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace baton {

// A thread's place in its team.
struct Team {
  int thread, threads;

  void barrier() const {
    if (threads > 1) GOMP_barrier();
  }

  // Call each(i) for this thread's share of 0 to n: neighbours, as many as the others have, or one more.
  template <class F>
  void share(long n, F each) const {
    const long size = n / threads, rest = n % threads;
    const long begin = thread * size + std::min<long>(thread, rest), end = begin + size + (thread < rest);
    for (long i = begin; i < end; ++i) each(i);
  }
};

// Call each(i) for numbers below n that no other thread of the team has taken from `next`.
template <class F>
inline void take(std::atomic<long>& next, long n, F each) {
  for (long i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) each(i);
}

// Divides numbers among the threads of a team as Team::share does; who is done takes what others have not begun. Where
// processors are not equally fast, as where other virtual machines share them, nobody waits for the slowest one's share.
class Shares {
 public:
  // Call each(i) for numbers below n, in the round-th of several rounds of n with a barrier between them.
  template <class F>
  void take(const Team& team, long n, long round, F each) {
    if (team.threads == 1 || team.threads > MOST_THREADS) return team.share(n, each);
    for (int t = 0; t < team.threads; ++t) {
      const int owner = (team.thread + t) % team.threads;
      const long size = n / team.threads, rest = n % team.threads;
      const long count = size + (owner < rest), begin = owner * size + std::min<long>(owner, rest);
      std::atomic<long>& done = begun_[owner].count;
      long i = done.load(std::memory_order_relaxed);
      while (i < (round + 1) * count)
        if (done.compare_exchange_weak(i, i + 1, std::memory_order_relaxed)) each(begin + i - round * count), ++i;
    }
  }

 private:
  static constexpr int MOST_THREADS = 64;
  struct alignas(64) Begun {
    std::atomic<long> count{0};
  };
  Begun begun_[MOST_THREADS];
};

// Run work(team) on so many threads, this one among them; 0: as many as torch uses.
template <class F>
inline void parallel(int threads, F work) {
  if (threads == 1) return work(Team{0, 1});
  GOMP_parallel([](void* data) { (*(F*)data)(Team{omp_get_thread_num(), omp_get_num_threads()}); }, &work,
                (unsigned)threads, 0);
}

// Grows, never shrinks; aligned to a cache line. One per thread and use.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  template <class T>
  T* get(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, bytes);
      size_ = data_ ? bytes : 0;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace baton
