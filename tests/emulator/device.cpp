// A device in host memory, "fakegpu", on which torch's CPU kernels run.
//
// What it has of a real one: indices, a current device, a thread of its own for backward, collectives that the device
// waits for and the host does not, tensors of several devices that do not mix, a host that waits to read, and streams
// that wait for each other where they are told to (`Order` in emulator.h).
#include "emulator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <set>

namespace emulator {

thread_local std::shared_ptr<Pending> issued;

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;

constexpr int kMostDevices = 16;

// Never destroyed: tensors may outlive what a library destroys at the end of a process.
std::mutex& awaited_mutex = *new std::mutex;
std::vector<std::shared_ptr<Pending>>& awaited = *new std::vector<std::shared_ptr<Pending>>;
std::vector<std::shared_ptr<Pending>>& abandoned = *new std::vector<std::shared_ptr<Pending>>;

thread_local DeviceIndex current = 0;
thread_local c10::StreamId streams[kMostDevices] = {};

std::mutex contexts_mutex;
std::set<int> contexts;  // the devices on which this process has allocated memory

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current; }

// The collectives that may still use memory.
std::vector<std::shared_ptr<Pending>> in_use() {
  std::lock_guard<std::mutex> guard(awaited_mutex);
  auto all = awaited;
  all.insert(all.end(), abandoned.begin(), abandoned.end());
  return all;
}

// Frees memory when the collectives are done that may use it; the host does not wait.
void release(void* memory) {
  static auto& held = *new std::vector<std::pair<void*, std::vector<std::shared_ptr<Pending>>>>;
  static auto& mutex = *new std::mutex;
  std::lock_guard<std::mutex> guard(mutex);
  if (memory) order.forget(memory);
  if (memory) held.emplace_back(memory, in_use());
  std::erase_if(held, [](auto& each) {
    bool done = std::all_of(each.second.begin(), each.second.end(), [](auto& pending) { return pending->done(); });
    if (done) free(each.first);
    return done;
  });
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    {
      std::lock_guard<std::mutex> guard(contexts_mutex);
      contexts.insert(current);
    }
    void* memory = nullptr;
    TORCH_CHECK(size == 0 || posix_memalign(&memory, 64, size) == 0, "fakegpu: out of memory");
    return {memory, memory, &release, Device(kDevice, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(kDevice, &memory);

// Pinned is the host's memory that was asked for as such.
std::mutex& pinned_mutex = *new std::mutex;
std::set<const void*>& pinned = *new std::set<const void*>;

void unpin(void* memory) {
  {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned.erase(memory);
  }
  free(memory);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = nullptr;
    TORCH_CHECK(size == 0 || posix_memalign(&memory, 64, size) == 0, "fakegpu: out of pinned memory");
    std::lock_guard<std::mutex> guard(pinned_mutex);
    if (memory) pinned.insert(memory);
    return {memory, memory, &unpin, Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
};
PinnedMemory pinned_memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  struct Event {
    std::shared_ptr<Pending> pending;
    Past past;
    std::vector<std::shared_ptr<Pending>> awaited;  // by the device, when it was recorded
  };

  c10::DeviceType type() const override { return kDevice; }
  Device getDevice() const override { return {kDevice, current}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "fakegpu: invalid device ordinal ", int(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(Device device) const noexcept override { return stream(device, streams[index_of(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream(device, ++last);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override { synchronise(order.past(stream.id())); }
  void synchronizeDevice(const DeviceIndex) const override { synchronise_all(); }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    *event = new Event{issued, issued ? issued->past : order.past(stream.id()), awaited_by_device()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto& known = *static_cast<Event*>(event);
    if (known.pending) let_device_wait(known.pending);
    order.wait(stream.id(), known.past);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& known = *static_cast<Event*>(event);
    auto done = [](auto& pending) { return pending->done(); };
    if (known.pending ? !done(known.pending) : !std::all_of(known.awaited.begin(), known.awaited.end(), done)) return false;
    order.host_waits(known.past);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    synchronise(event ? static_cast<Event*>(event)->past : Past());
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  static void synchronise(const Past& past) {
    counts[synchronisations]++;
    catch_up();
    order.host_waits(past);
  }
  static void synchronise_all() {
    synchronise({});
    order.host_waits_for_all();
  }

 private:
  static c10::Stream stream(Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(kDevice, index_of(device)), id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }  // older torch asks for neither
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { maybeExchangeDevice(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return maybeExchangeDevice(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index >= 0 ? std::exchange(current, index) : current;
  }
  bool isPinnedPtr(const void* memory) const override {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    return pinned.count(memory);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void*) const override { return {kDevice, current}; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU).clone();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto fresh = memory.allocate(size);
    if (impl->data()) memcpy(fresh.get(), impl->data(), std::min(size, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};

// ---------------------------------------------------------------- operators

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(kDevice, current)));
  return at::detail::empty_generic(size, &memory, kKeys, at::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kDevice, current)));
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, at::dtype_or_default(dtype));
}

// What a kernel of the current stream reads or writes; memory of the host's is no matter.
void touch(const Tensor& tensor, bool writes, const std::string& what) {
  if (tensor.is_privateuseone() && tensor.has_storage()) order.touch(current_stream(), tensor.storage().data(), writes, what);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  catch_up();
  order.begin(current_stream());
  touch(from, false, "a copy");
  touch(to, true, "a copy");
  bool host_waits = !to.is_privateuseone() || !(from.is_privateuseone() || non_blocking);
  if (host_waits) order.host_waits(order.past(current_stream()));
  if (!to.is_privateuseone())
    counts[to_host]++;
  else if (from.is_privateuseone() || non_blocking)
    counts[kernels]++;
  else
    counts[to_device]++;
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  catch_up();
  counts[items]++;
  order.begin(current_stream());
  touch(tensor, false, "item");
  order.host_waits(order.past(current_stream()));
  return on_host(tensor).item();
}

const Tensor& resize(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t bytes = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (tensor.storage().nbytes() < bytes) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  if (format) impl->empty_tensor_restride(*format);
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage source) {
  int64_t size = source.nbytes() / tensor.itemsize();
  return at::native::set_storage_cpu_(tensor, std::move(source), 0, {size});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return at::native::set_storage_cpu_(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor&, c10::Stream) {}

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
  catch_up();
  counts[kernels]++;
  std::optional<Tensor> own;
  if (bias && bias->defined()) own = on_host(*bias);
  return at::convolution(on_host(x), on_host(weight), own, stride, padding, dilation, transposed, output_padding, groups)
      .to(x.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  catch_up();
  counts[kernels]++;
  std::vector<int64_t> bias{gradient.size(1)};
  auto [a, b, c] = at::convolution_backward(on_host(gradient), on_host(x), on_host(weight), bias, stride, padding,
                                            dilation, transposed, output_padding, groups, mask);
  auto back = [&](Tensor t) { return t.defined() ? t.to(x.device()) : t; };
  return {back(a), back(b), back(c)};
}

// A tensor of the device over the memory of a CPU tensor, which it keeps alive.
Tensor on_device(const Tensor& host, Device device) {
  auto* owner = new c10::Storage(host.storage());
  c10::DataPtr data(const_cast<void*>(host.storage().data()), owner,
                    [](void* kept) {
                      order.forget(static_cast<c10::Storage*>(kept)->data());
                      delete static_cast<c10::Storage*>(kept);
                    },
                    device);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), host.storage().nbytes(),
                                                       std::move(data), &memory, true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), kKeys, host.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return tensor;
}

// Runs an operator of the CPU's over the memory of its arguments: also what writes to some without saying so is right.
class OnHost {
 public:
  OnHost(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), name_(op.schema().name()), stack_(stack), hosts_too_(name_.find("aten::index") == 0 || name_.find("aten::_index") == 0) {}

  void run() {
    const auto& schema = op_.schema();
    order.begin(current_stream());
    size_t first = stack_->size() - schema.arguments().size();
    for (size_t i = first; i < stack_->size(); i++) {
      const auto& argument = schema.arguments()[i - first];
      auto* alias = argument.alias_info();
      to_host((*stack_)[i], argument.is_out() ? Access::result : alias && alias->isWrite() ? Access::write : Access::read);
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    for (auto& [tensor, host] : written_) resize_as(tensor, host);
    for (size_t i = stack_->size() - schema.returns().size(); i < stack_->size(); i++) to_device((*stack_)[i]);
  }

 private:
  enum class Access { read, write, result };  // a result may be resized

  void to_host(c10::IValue& value, Access access) {
    if (value.isTensor()) {
      value = to_host(value.toTensor(), access);
    } else if (value.isTensorList()) {
      std::vector<Tensor> hosts;
      for (const Tensor& each : value.toTensorVector()) hosts.push_back(to_host(each, access));
      value = hosts;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> hosts;
      for (std::optional<Tensor> each : value.toOptionalTensorList())
        hosts.push_back(each ? std::optional<Tensor>(to_host(*each, access)) : std::nullopt);
      value = hosts;
    } else if (value.isDevice() && value.toDevice().type() == kDevice) {
      device_ = Device(kDevice, index_of(value.toDevice()));
      value = Device(at::kCPU);
    }
  }

  Tensor to_host(const Tensor& tensor, Access access) {
    if (!tensor.defined()) return tensor;
    // Tensors of several devices do not mix, but for a host's numbers and its indices.
    if (tensor.is_cpu() && (tensor.dim() == 0 || hosts_too_)) return tensor;
    TORCH_CHECK(!device_ || *device_ == tensor.device(), "Expected all tensors to be on the same device, but found ",
                *device_, " and ", tensor.device(), " in ", name_);
    device_ = tensor.device();
    if (!tensor.is_privateuseone()) return tensor;
    touch(tensor, access != Access::read, name_);
    bool resizable = access == Access::result || (access == Access::write && tensor.numel() == 0);
    Tensor host = resizable ? on_host(tensor).clone() : on_host(tensor);
    tensors_.emplace_back(tensor, host);
    if (access != Access::read) written_.emplace_back(tensor, host);
    return host;
  }

  // What was written to may lie in other memory, and have got another size.
  static void resize_as(Tensor& tensor, const Tensor& host) {
    if (host.sizes() == tensor.sizes()) {
      if (host.data_ptr() != tensor.data_ptr()) on_host(tensor).copy_(host);
      return;
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    if (host.numel()) {
      impl->set_storage_keep_dtype(on_device(host, tensor.device()).storage());
      impl->set_storage_offset(host.storage_offset());
    }
    impl->set_sizes_and_strides(host.sizes(), host.strides());
  }

  void to_device(c10::IValue& value) {
    if (value.isTensor()) {
      value = to_device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> found;
      for (const Tensor& each : value.toTensorVector()) found.push_back(to_device(each));
      value = found;
    }
  }

  Tensor to_device(const Tensor& host) {
    if (!host.defined() || !host.is_cpu()) return host;
    for (const auto& [tensor, its] : tensors_) {
      if (its.is_same(host)) return tensor;
      if (host.has_storage() && host.storage().data() && host.storage().data() == its.storage().data()) return view(tensor, host);
    }
    auto made = on_device(host, device_.value_or(Device(kDevice, current)));
    touch(made, true, name_);
    return made;
  }

  static Tensor view(const Tensor& tensor, const Tensor& host) {
    auto* begin = static_cast<const char*>(tensor.storage().data());
    auto offset = (static_cast<const char*>(host.const_data_ptr()) - begin) / int64_t(host.itemsize());
    auto found = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                          tensor.key_set(), host.dtype());
    found.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), offset);
    return found;
  }

  const c10::OperatorHandle& op_;
  const std::string name_;
  torch::jit::Stack* stack_;
  const bool hosts_too_;
  std::optional<Device> device_;
  std::vector<std::pair<Tensor, Tensor>> tensors_, written_;  // of the device, and over their memory
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  catch_up();
  counts[kernels]++;
  OnHost(op, stack).run();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// Autocast: products in a lower precision, as everywhere; all else as it comes.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
}

// Conjugated and negated memory is copied as such: what makes it plain is a copy itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

long current_stream() { return streams[current]; }

int device_count() {
  static int devices = std::min(std::stoi(setting("FAKEGPU_COUNT", "16")), kMostDevices);
  return devices;
}

void let_device_wait(std::shared_ptr<Pending> pending) {
  order.wait(current_stream(), pending->past);
  std::lock_guard<std::mutex> guard(awaited_mutex);
  awaited.push_back(std::move(pending));
}

std::vector<std::shared_ptr<Pending>> awaited_by_device() {
  std::lock_guard<std::mutex> guard(awaited_mutex);
  return awaited;
}

void catch_up() {
  std::vector<std::shared_ptr<Pending>> mine;
  {
    std::lock_guard<std::mutex> guard(awaited_mutex);
    mine.swap(awaited);
  }
  for (auto& pending : mine) pending->wait();
}

// The device waits for no collective any more: those of a run that has failed are no matter of the next one.
void abandon() {
  std::lock_guard<std::mutex> guard(awaited_mutex);
  abandoned.insert(abandoned.end(), awaited.begin(), awaited.end());
  awaited.clear();
  std::erase_if(abandoned, [](auto& pending) { return pending->done(); });
}

Tensor on_host(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  Tensor host = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                              [](void*) {}, options);
  if (tensor.is_conj()) host = host.conj();
  return tensor.is_neg() ? at::_neg_view(host) : host;
}

}  // namespace emulator

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace emulator;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  static std::optional<torch::Library> autograd;  // of operators that have none, which older torch leaves to the device
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(c10::DispatchKey::AutogradPrivateUse1)) {
    autograd.emplace(torch::Library::IMPL, "_", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
    autograd->fallback(torch::CppFunction::makeFallthrough());
  }
  module.def("set_device", [](int index) { current = std::max(index, 0); });
  module.def("current_device", [] { return int(current); });
  module.def("device_count", device_count);
  module.def("synchronize", Guard::synchronise_all);
  module.def("take_races", [] { return order.take_races(); });
  module.def("abandon", abandon);
  module.def("contexts", [] {
    std::lock_guard<std::mutex> guard(contexts_mutex);
    return std::vector<int>(contexts.begin(), contexts.end());
  });
  module.def("reset", [] {
    std::lock_guard<std::mutex> guard(contexts_mutex);
    contexts.clear();
    for (auto& each : counts) each = 0;
  });
  module.def("counts", [] {
    std::map<std::string, long> found;
    for (int i = 0; i < kCounts; i++) found[kNames[i]] = counts[i];
    return found;
  });
  bind_backend(module);
}
