// What device.cpp and operators.cpp share.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/Storage.h>

#include "memory.h"

namespace rig {

inline c10::Device device() { return c10::Device(c10::DeviceType::PrivateUse1, 0); }

c10::Allocator& allocator();

// Give a storage another size; what fits is kept.
void resize(const c10::Storage& storage, size_t bytes);

void register_collectives();

// The device's generator, which draws as the host's does.
struct Generator final : c10::GeneratorImpl {
  Generator();
  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "rig: generators have no offset"); }
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  Generator* clone_impl() const override;

  at::Generator host;
};

at::Generator& default_generator();

}  // namespace rig
