// The memory of the test device.
//
// One region is mapped twice. Tensors have addresses in the first mapping, which nobody may read or write: host code that is
// given a device's tensor ends the process at once. The device's own kernels go to the second, at a fixed distance. Memory is
// NaN from its allocation to the first write, and again after it is freed.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "log.h"

namespace rig {

constexpr size_t kReserved = size_t(1) << 37;  // addresses, not memory
constexpr size_t kAlignment = 512;

class Memory {
 public:
  Memory() {
    int file = memfd_create("rig", 0);
    if (file < 0 || ftruncate(file, kReserved) != 0) abort();
    front_ = map(file, PROT_NONE);
    back_ = map(file, PROT_READ | PROT_WRITE);
    close(file);
    free_[0] = kReserved;
  }

  // The address of `bytes` bytes, which belong to `stream`; null if the budget does not allow them.
  void* allocate(size_t bytes, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (budget_ && live_ + int64_t(bytes) > budget_) return nullptr;
    size_t length = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    auto space = free_.begin();
    while (space != free_.end() && space->second < length) ++space;
    if (space == free_.end()) return nullptr;
    size_t at = space->first, left = space->second - length;
    free_.erase(space);
    if (left) free_[at + length] = left;
    blocks_[at] = {bytes, length, {stream}};
    live_ += bytes;
    if (live_ > peak_) peak_ = live_;
    note();
    memset(back_ + at, 0xff, length);
    return front_ + at;
  }

  // The memory may be given out again once the streams that use it have come this far.
  void free(void* address) {
    std::unique_lock<std::mutex> lock(mutex_);
    size_t at = static_cast<char*>(address) - front_;
    Block block = blocks_.at(at);
    blocks_.erase(at);
    live_ -= block.bytes;
    note();
    lock.unlock();
    when_reached(block.streams, [this, at, length = block.length] { release(at, length); });
  }

  // Keep what lies at `address` until `stream` has come this far when it is freed.
  void use_on(const void* address, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto block = blocks_.find(static_cast<const char*>(address) - front_);
    if (block != blocks_.end()) block->second.streams.push_back(stream);
  }

  // Where the device's kernels find what lies at a tensor's address.
  char* opened(const void* address) const {
    return back_ + (static_cast<const char*>(address) - front_);
  }

  // The distance from the opened region's begin, or -1 for memory outside of it.
  int64_t offset_of_opened(const void* address) const {
    auto distance = static_cast<const char*>(address) - back_;
    return distance >= 0 && size_t(distance) < kReserved ? distance : -1;
  }

  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }
  int64_t budget() const { return budget_; }
  void set_budget(int64_t bytes) { budget_ = bytes; }
  void reset_peak() { peak_ = live_; }

 private:
  struct Block {
    size_t bytes, length;
    std::vector<int64_t> streams;
  };

  void note() const {
    auto now = Clock::now();
    log().write(0, live_, now, now);
  }

  static char* map(int file, int protection) {
    void* at = mmap(nullptr, kReserved, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (at == MAP_FAILED) abort();
    return static_cast<char*>(at);
  }

  void release(size_t at, size_t length) {
    memset(back_ + at, 0xff, length);
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = free_.lower_bound(at);
    if (next != free_.end() && next->first == at + length) {
      length += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += length;
        return;
      }
    }
    free_[at] = length;
  }

  char *front_, *back_;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // where spaces begin, and their lengths
  std::unordered_map<size_t, Block> blocks_;
  int64_t live_ = 0, peak_ = 0, budget_ = 0;
};

// Host memory from which, and to which, copies run behind.
class Pinned {
 public:
  // How much memory torch's allocator for CUDA takes for `bytes` bytes, and so does this one.
  static size_t taken(size_t bytes) { return bytes ? std::bit_ceil(bytes) : 1; }

  void* allocate(size_t bytes) {
    void* at = nullptr;
    if (posix_memalign(&at, 4096, bytes) != 0) return nullptr;
    add(at, bytes);
    return at;
  }

  // Pin memory that the caller has allocated, and will free after `remove`.
  void add(void* address, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[static_cast<char*>(address)] = {bytes, {}};
    live_ += bytes;
    if (live_ > peak_) peak_ = live_;
  }

  // Returns the bytes that were pinned.
  size_t remove(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto block = blocks_.find(static_cast<char*>(address));
    auto bytes = block->second.bytes;
    live_ -= bytes;
    blocks_.erase(block);
    return bytes;
  }

  // Returns the bytes that are free.
  size_t free(void* address) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto block = blocks_.find(static_cast<char*>(address));
    auto bytes = block->second.bytes;
    auto streams = block->second.streams;
    live_ -= bytes;
    blocks_.erase(block);
    lock.unlock();
    when_reached(streams, [address] { ::free(address); });
    return bytes;
  }

  void use_on(const void* address, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto block = find(address);
    if (block != blocks_.end()) block->second.streams.push_back(stream);
  }

  bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(address) != blocks_.end();
  }

  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }
  void reset_peak() { peak_ = live_; }

 private:
  struct Block {
    size_t bytes;
    std::vector<int64_t> streams;
  };

  std::map<const char*, Block>::iterator find(const void* address) {
    auto at = static_cast<const char*>(address);
    auto block = blocks_.upper_bound(at);
    if (block == blocks_.begin()) return blocks_.end();
    --block;
    return at < block->first + block->second.bytes ? block : blocks_.end();
  }

  std::mutex mutex_;
  std::map<const char*, Block> blocks_;
  int64_t live_ = 0, peak_ = 0;
};

// The bytes of host memory that torch has in use or that are pinned, and a budget for them.
class Host {
 public:
  // Whether the budget allows `bytes` more, which are then counted.
  bool take(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (budget_ && live_ + bytes > budget_) return false;
    live_ += bytes;
    if (live_ > peak_) peak_ = live_;
    return true;
  }

  void give(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    live_ -= bytes;
  }

  // What lies at an address has been taken: `forget` gives it back.
  void note(void* address, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[address] = bytes;
  }

  void forget(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto block = blocks_.find(address);
    live_ -= block->second;
    blocks_.erase(block);
  }

  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }
  int64_t budget() const { return budget_; }
  void set_budget(int64_t bytes) { budget_ = bytes; }
  void reset_peak() { peak_ = live_; }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, int64_t> blocks_;
  int64_t live_ = 0, peak_ = 0, budget_ = 0;
};

// None ends before the process does: tensors may be freed at any time up to then.
inline Host& host() {
  static Host* made = new Host();
  return *made;
}

inline Memory& memory() {
  static Memory* made = new Memory();
  return *made;
}

inline Pinned& pinned() {
  static Pinned* made = new Pinned();
  return *made;
}

}  // namespace rig
