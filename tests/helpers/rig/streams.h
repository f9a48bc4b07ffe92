// Streams of the test device: each is a thread with a queue of jobs. Number 0 is the default stream.
#pragma once
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace rig {

using Job = std::function<void()>;
using Clock = std::chrono::steady_clock;

class Worker {
 public:
  Worker() {
    std::thread([this] { run(); }).detach();
  }

  // Returns the job's number.
  uint64_t push(Job job) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(job));
    changed_.notify_all();
    return ++given_;
  }

  // Wait until job number `job` has ended.
  void wait(uint64_t job) {
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = std::max(wanted_, job);
    changed_.notify_all();
    changed_.wait(lock, [&] { return done_ >= job; });
  }

  // In a job: wait until somebody waits for it.
  void until_wanted() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return wanted_ > done_; });
  }

  // The worker whose job this thread does; null in other threads.
  static Worker*& here() {
    static thread_local Worker* worker = nullptr;
    return worker;
  }

  bool reached(uint64_t job) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= job;
  }

  // The number of the last job so far.
  uint64_t last() {
    std::lock_guard<std::mutex> lock(mutex_);
    return given_;
  }

  void drain() { wait(last()); }
  bool idle() { return reached(last()); }

 private:
  void run() {
    here() = this;
    for (;;) {
      Job job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !queue_.empty(); });
        job = std::move(queue_.front());
        queue_.pop_front();
      }
      job();
      job = nullptr;
      std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;
  uint64_t given_ = 0, done_ = 0, wanted_ = 0;
};

class Streams {
 public:
  Worker& operator[](int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (int64_t(workers_.size()) <= number) workers_.push_back(new Worker());
    return *workers_[number];
  }

  int64_t make() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (workers_.empty()) workers_.push_back(new Worker());
    workers_.push_back(new Worker());
    return workers_.size() - 1;
  }

  void drain() {
    std::vector<Worker*> all;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      all = workers_;
    }
    for (auto* worker : all) worker->drain();
  }

 private:
  std::mutex mutex_;
  std::vector<Worker*> workers_;
};

inline Streams& streams() {
  static Streams* made = new Streams();
  return *made;
}

inline thread_local int64_t current_stream = 0;

// Do `job` once the streams have done all that they were given so far: at once, if they have.
inline void when_reached(const std::vector<int64_t>& numbers, Job job) {
  std::vector<std::pair<Worker*, uint64_t>> busy;
  for (auto number : numbers) {
    auto& worker = streams()[number];
    auto last = worker.last();
    if (!worker.reached(last)) busy.emplace_back(&worker, last);
  }
  if (busy.empty()) return job();
  busy.front().first->push([busy, job = std::move(job)] {
    for (size_t i = 1; i < busy.size(); ++i) busy[i].first->wait(busy[i].second);
    job();
  });
}

// A point in a stream's queue.
struct Event {
  int64_t stream = -1;
  uint64_t job = 0;
  Clock::time_point time;  // when the stream came to it
};

}  // namespace rig
