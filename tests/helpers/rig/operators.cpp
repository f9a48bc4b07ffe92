// The operators of the test device. Nearly all run on the host's kernels, in the caller's thread, on tensors that share the
// memory of the device's: once the current stream has done what it was given.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "device.h"
#include "links.h"

namespace rig {
namespace {

using at::IntArrayRef, at::Tensor, c10::DispatchKey, c10::DispatchKeySet;

const DispatchKeySet kKeys(DispatchKey::PrivateUse1);

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// A host tensor over the memory of a device's tensor; it does not keep the memory.
Tensor opened(const void* data, IntArrayRef sizes, IntArrayRef strides, at::ScalarType dtype) {
  return at::from_blob(memory().opened(data), sizes, strides, [](void*) {}, at::TensorOptions().dtype(dtype));
}

const char* begin_of(const Tensor& tensor) {
  return static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
}

Tensor opened(const Tensor& tensor) {
  if (tensor.numel() == 0)
    return at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
  auto host = opened(begin_of(tensor), tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.is_conj()) host = host.conj();
  return tensor.is_neg() ? host._neg_view() : host;
}

Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &allocator(), kKeys, dtype.value_or(at::kFloat), format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), kKeys, dtype.value_or(at::kFloat));
}

// ---- copies

// One side of a copy, without a reference to its tensor: a job must not keep what its owner gives up.
struct Side {
  explicit Side(const Tensor& tensor)
      : data(tensor.numel() ? begin_of(tensor) : nullptr), sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()), dtype(tensor.scalar_type()), on_device(rig::on_device(tensor)) {}

  Tensor tensor() const {
    auto at = on_device ? memory().opened(data) : const_cast<char*>(data);
    return at::from_blob(at, sizes, strides, [](void*) {}, at::TensorOptions().dtype(dtype));
  }

  const char* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool on_device;
};

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (self.numel() == 0 || to.numel() == 0) return to;
  Side source(self), target(to);
  Link* link = source.on_device == target.on_device ? nullptr : target.on_device ? &up() : &down();
  auto& host = source.on_device ? to : self;
  bool behind = non_blocking && link && source.dtype == target.dtype && pinned().holds(begin_of(host));
  if (behind) pinned().use_on(begin_of(host), current_stream);
  auto bytes = int64_t(self.nbytes());
  auto job = [source, target, link, bytes] {
    c10::InferenceMode no_autograd;
    auto copy = [&] { target.tensor().copy_(source.tensor()); };
    link ? link->carry(bytes, copy) : copy();
  };
  auto& stream = streams()[current_stream];
  auto number = stream.push(job);
  if (!behind) stream.wait(number);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar item(const Tensor& self) {
  streams()[current_stream].drain();
  at::Scalar value;
  down().carry(self.itemsize(), [&] { value = opened(self).item(); });
  return value;
}

// ---- views and sizes

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                  std::optional<c10::SymInt> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                       self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(offset ? offset->expect_int() : self.storage_offset());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
  return view;
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return as_strided(self, sizes, strides, std::nullopt);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef wanted) {
  auto sizes = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(wanted), self.numel());
  auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with input tensor's size and stride; use .reshape(...)");
  return at::as_strided(self, sizes, *strides, self.storage_offset());
}

const Tensor& resize_tensor(const Tensor& self, c10::SymIntArrayRef wanted, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(wanted);
  size_t bytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
  if (self.storage().nbytes() < bytes) resize(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
                    c10::SymIntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_storage_offset(offset.expect_int());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  int64_t elements = storage.nbytes() / self.itemsize();
  return self.set_(std::move(storage), 0, {elements}, {1});
}

bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().is_alias_of(other.storage()) && self.storage_offset() == other.storage_offset() &&
         self.sizes().equals(other.sizes()) && self.strides().equals(other.strides());
}

void record_stream(Tensor& self, c10::Stream stream) { memory().use_on(self.storage().data(), stream.id()); }

// ---- everything else

// The arguments of one call, opened for the host's kernels, and the way back.
class Call {
 public:
  void open(c10::IValue& value, const c10::Argument& argument) {
    if (value.isNone()) {
      static const auto generator = c10::OptionalType::create(c10::GeneratorType::get());
      if (*argument.type() == *generator) value = default_generator().get<Generator>()->host;
    } else if (value.isTensor()) {
      value = open(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> opened;
      for (Tensor tensor : value.toTensorList()) opened.push_back(open(tensor));
      value = opened;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> opened;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        opened.push_back(tensor ? std::optional<Tensor>(open(*tensor)) : tensor);
      value = opened;
    } else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      if (generator.defined() && generator.device().is_privateuseone()) value = generator.get<Generator>()->host;
    } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
      value = c10::Device(c10::kCPU);
    }
  }

  void close(c10::IValue& value) {
    if (value.isTensor()) {
      value = close(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> closed;
      for (Tensor tensor : value.toTensorList()) closed.push_back(close(tensor));
      value = closed;
    }
  }

 private:
  Tensor open(const Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    auto host = opened(tensor);
    opened_.emplace_back(tensor, host);
    return host;
  }

  // A tensor of the device for a result: an argument that was written to, a view of one, or a copy.
  Tensor close(const Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (auto& [tensor, host] : opened_) {
      if (!host.is_same(result)) continue;
      if (!tensor.sizes().equals(result.sizes())) {  // an output that was given with another size
        tensor.resize_(result.sizes());
        opened(tensor).copy_(result);
      }
      return tensor;
    }
    auto offset = result.numel() ? memory().offset_of_opened(result.const_data_ptr()) : -1;
    for (auto& [tensor, host] : opened_) {
      if (offset < 0 || host.numel() == 0) continue;
      auto begin = memory().offset_of_opened(memory().opened(tensor.storage().data()));
      if (offset >= begin && offset < begin + int64_t(tensor.storage().nbytes()))
        return at::as_strided(tensor, result.sizes(), result.strides(), (offset - begin) / result.itemsize());
    }
    auto copy = at::empty_strided(result.sizes(), result.strides(), result.options().device(device()));
    if (result.numel()) opened(copy).copy_(result);
    return copy;
  }

  std::vector<std::pair<Tensor, Tensor>> opened_;
};

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  streams()[current_stream].drain();
  Call call;
  auto& arguments = op.schema().arguments();
  auto first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) call.open((*stack)[first + i], arguments[i]);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  auto results = op.schema().returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) call.close((*stack)[i]);
}

// Convolutions, which torch leaves to devices that are not its own.

Tensor landed(const Tensor& result) {
  if (!result.defined()) return result;
  auto copy = at::empty_strided(result.sizes(), result.strides(), result.options().device(device()));
  opened(copy).copy_(result);
  return copy;
}

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
                   c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                   c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  streams()[current_stream].drain();
  auto with = bias && bias->defined() ? std::optional<Tensor>(opened(*bias)) : std::nullopt;
  return landed(at::convolution_symint(opened(x), opened(weight), with, stride, padding, dilation, transposed,
                                       output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
  streams()[current_stream].drain();
  c10::SymInt channels = grad.size(1);
  auto [of_x, of_weight, of_bias] =
      at::convolution_backward_symint(opened(grad), opened(x), opened(weight), c10::SymIntArrayRef(&channels, 1), stride,
                                      padding, dilation, transposed, output_padding, groups, wanted);
  return {landed(of_x), landed(of_weight), landed(of_bias)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// Under autocast the casts are those of every GPU.
#define NARROW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(NARROW)
  AT_FORALL_FP32(WIDE)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("view", &view);
  m.impl("resize_", &resize_tensor);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("is_set_to", &is_set_to);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY(rig, m) { m.def("default_generator() -> Generator?", [] { return default_generator(); }); }

// Collectives are the backend's for the host. torch has kernels for them, which ask for a backend of the device's own and are
// replaced; that it warns of this is no news.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

void register_collectives() {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static torch::Library library(torch::Library::IMPL, "c10d", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (auto* name : {"allreduce_", "broadcast_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "send",
                     "recv_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

}  // namespace rig
