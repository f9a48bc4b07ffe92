// What happened when: copies at the links, and how much of the device's memory was in use.
#pragma once
#include <atomic>
#include <mutex>
#include <vector>

#include "streams.h"

namespace rig {

struct Entry {
  int64_t kind;  // 0: the device's memory, 1: a copy to the device, 2: a copy from it
  int64_t bytes;
  double begin, end;  // seconds of the steady clock
};

class Log {
 public:
  void write(int64_t kind, int64_t bytes, Clock::time_point begin, Clock::time_point end) {
    if (!on) return;
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.push_back({kind, bytes, seconds(begin), seconds(end)});
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.clear();
  }

  int64_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return entries_.size();
  }

  Entry at(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return entries_[number];
  }

  std::atomic<bool> on{false};

 private:
  static double seconds(Clock::time_point time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
  }

  std::mutex mutex_;
  std::vector<Entry> entries_;
};

inline Log& log() {
  static Log* made = new Log();
  return *made;
}

}  // namespace rig
