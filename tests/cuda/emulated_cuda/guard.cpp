// What a CPU build of PyTorch lacks to accept tensors that say cuda:0: a device guard, and the hooks that say that CUDA is there.
// Loaded before libtorch, with its symbols visible to it (RTLD_GLOBAL), so that libtorch finds these definitions first.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <optional>

namespace {
const c10::Device kCuda(c10::DeviceType::CUDA, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kCuda);

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kCuda; }
  c10::Device getDevice() const override { return kCuda; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream getNewStream(c10::Device, int) const override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks : public at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
}  // namespace

#define VISIBLE __attribute__((visibility("default")))
namespace at::detail {
VISIBLE const CUDAHooksInterface& getCUDAHooks() {
  static Hooks hooks;
  return hooks;
}
}  // namespace at::detail
namespace at::accelerator {
VISIBLE std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
VISIBLE c10::DeviceIndex deviceCount() { return 1; }
VISIBLE bool isAccelerator(c10::DeviceType type) { return type == c10::DeviceType::CUDA; }
}  // namespace at::accelerator
