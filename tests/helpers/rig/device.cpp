// torch's view of the test device: allocators, guard, generator, hooks. Its operators are in operators.cpp.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device.h"
#include "links.h"

namespace rig {
namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

void free_device(void* address) {
  if (address) memory().free(address);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = nullptr;
    if (bytes) {
      at = memory().allocate(bytes, current_stream);
      TORCH_CHECK_WITH(OutOfMemoryError, at, "rig: out of memory: ", bytes, " bytes more than the ", memory().live(),
                       " in use exceed the budget of ", memory().budget());
    }
    return {at, at, &free_device, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    streams()[current_stream].drain();
    memcpy(memory().opened(to), memory().opened(from), bytes);
  }
};

void take_of_host(size_t bytes) {
  TORCH_CHECK_WITH(OutOfMemoryError, host().take(bytes), "rig: out of host memory: ", bytes, " bytes more than the ",
                   host().live(), " in use exceed the budget of ", host().budget());
}

// The host's own allocator, whose memory is counted.
struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    take_of_host(bytes);
    auto data = own()->allocate(bytes);
    if (!data) return data;
    host().note(data.get(), bytes);
    data.compare_exchange_deleter(own()->raw_deleter(), &free);
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }

  static void free(void* address) {
    if (address == nullptr) return;  // of no bytes
    host().forget(address);
    own()->raw_deleter()(address);
  }
  static c10::Allocator* own() {
    static auto* found = c10::GetCPUAllocator();
    return found;
  }
};

void free_pinned(void* address) { host().give(pinned().free(address)); }

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    bytes = Pinned::taken(bytes);
    take_of_host(bytes);
    void* at = pinned().allocate(bytes);
    return {at, at, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

PinnedAllocator pinned_allocator;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::PrivateUse1> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return device(); }
  Device exchangeDevice(Device) const override { return device(); }

  Stream stream(int64_t number) const { return Stream(Stream::UNSAFE, device(), number); }
  Stream getStream(Device) const noexcept override { return stream(current_stream); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getNewStream(Device, int) const override { return stream(streams().make()); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(streams().make()); }
  Stream exchangeStream(Stream next) const noexcept override {
    auto before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override { return streams()[stream.id()].idle(); }
  void synchronizeStream(const Stream& stream) const override { streams()[stream.id()].drain(); }
  void synchronizeDevice(const DeviceIndex) const override { streams().drain(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    memory().use_on(data.get(), stream.id());
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new std::shared_ptr<Event>();
    auto made = std::make_shared<Event>();
    made->stream = stream.id();
    made->job = streams()[stream.id()].push([made] { made->time = Clock::now(); });
    *static_cast<std::shared_ptr<Event>*>(*event) = made;
  }
  void block(void* event, const Stream& stream) const override {
    auto known = of(event);
    if (!known || known->stream == stream.id()) return;
    streams()[stream.id()].push([known] { streams()[known->stream].wait(known->job); });
  }
  bool queryEvent(void* event) const override {
    auto known = of(event);
    return !known || streams()[known->stream].reached(known->job);
  }
  void synchronizeEvent(void* event) const override {
    if (auto known = of(event)) streams()[known->stream].wait(known->job);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(of(second)->time - of(first)->time).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Event>*>(event);
  }

 private:
  static std::shared_ptr<Event> of(void* event) {
    return event ? *static_cast<std::shared_ptr<Event>*>(event) : nullptr;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  bool isPinnedPtr(const void* address) const override { return pinned().holds(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<Generator>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize(storage, bytes); }
};

Hooks hooks;

}  // namespace

c10::Allocator& allocator() {
  static auto* made = new DeviceAllocator();
  return *made;
}

at::Generator& default_generator() {
  static auto* made = new at::Generator(at::make_generator<Generator>());
  return *made;
}

Generator::Generator()
    : c10::GeneratorImpl(rig::device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      host(at::detail::createCPUGenerator()) {}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const { return host.unsafeGetGeneratorImpl()->get_state(); }

void Generator::set_state(const c10::TensorImpl& state) { host.unsafeGetGeneratorImpl()->set_state(state); }

Generator* Generator::clone_impl() const {
  auto* copy = new Generator();
  copy->host = host.clone();
  return copy;
}

void resize(const c10::Storage& storage, size_t bytes) {
  auto data = allocator().allocate(bytes);
  if (auto kept = std::min(bytes, storage.nbytes())) allocator().copy_data(data.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

REGISTER_ALLOCATOR(DeviceType::PrivateUse1, &allocator());
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace rig

// What Python asks and sets, by ctypes.
extern "C" {
void rig_start() {
  at::RegisterPrivateUse1HooksInterface(&rig::hooks);
  rig::register_collectives();
  rig::HostAllocator::own();  // before another takes its place
  c10::SetCPUAllocator(new rig::HostAllocator(), 1);
}
void rig_set_budgets(int64_t device, int64_t host) {
  rig::memory().set_budget(device);
  rig::host().set_budget(host);
}
void rig_set_rates(double up, double down) {
  rig::up().rate = up;
  rig::down().rate = down;
}
void rig_reset() {
  rig::streams().drain();
  rig::memory().reset_peak();
  rig::pinned().reset_peak();
  rig::host().reset_peak();
  for (auto* link : {&rig::up(), &rig::down()}) link->copies = link->moved = 0;
}
void rig_record(bool on) {
  rig::streams().drain();
  if (on) rig::log().clear();
  rig::log().on = on;
}
int64_t rig_recorded() { return rig::log().size(); }
void rig_entry(int64_t number, rig::Entry* entry) { *entry = rig::log().at(number); }
int rig_pin(void* address, size_t bytes) {
  if (!rig::host().take(bytes)) return 2;  // CUDA's number for memory that could not be had
  rig::pinned().add(address, bytes);
  return 0;
}
int rig_unpin(void* address) {
  rig::host().give(rig::pinned().remove(address));
  return 0;
}
int64_t rig_count(int what) {
  switch (what) {
    case 0: return rig::memory().live();
    case 1: return rig::memory().peak();
    case 2: return rig::pinned().live();
    case 3: return rig::pinned().peak();
    case 4: return rig::up().moved;
    case 5: return rig::down().moved;
    case 6: return rig::up().copies;
    case 7: return rig::down().copies;
    case 8: return rig::host().live();
    default: return rig::host().peak();
  }
}
}
