// The links between host and device: one in each direction, which copies take turns on.
#pragma once
#include <atomic>
#include <mutex>
#include <thread>

#include "log.h"

namespace rig {

class Link {
 public:
  explicit Link(int64_t kind) : kind_(kind) {}

  // Do the copy of `bytes` bytes, at the end of the time that the link needs for them: who reads too early, or writes too
  // early to what is being copied, gets wrong numbers.
  void carry(int64_t bytes, const Job& copy) {
    ++copies;
    moved += bytes;
    if (rate < 0 && Worker::here()) Worker::here()->until_wanted();
    auto begin = Clock::now();
    if (rate <= 0) {
      copy();
      return log().write(kind_, bytes, begin, Clock::now());
    }
    std::lock_guard<std::mutex> turn(mutex_);
    begin = Clock::now();
    auto end = begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bytes / rate));
    std::this_thread::sleep_until(end);
    copy();
    log().write(kind_, bytes, begin, Clock::now());
  }

  std::atomic<int64_t> copies{0}, moved{0};
  std::atomic<double> rate{0};  // bytes per second; 0: a copy takes no time; below 0: until somebody waits for it

 private:
  int64_t kind_;
  std::mutex mutex_;
};

inline Link& up() {
  static Link* made = new Link(1);
  return *made;
}

inline Link& down() {
  static Link* made = new Link(2);
  return *made;
}

}  // namespace rig
