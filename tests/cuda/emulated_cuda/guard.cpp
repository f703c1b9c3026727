// What a CPU build of PyTorch lacks to accept tensors that say cuda:0: a device guard, and hooks that say that there is
// CUDA. Loaded before libtorch, which finds these definitions first.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::DeviceType::CUDA;

namespace {
const c10::Device kCuda(CUDA, 0);

struct Guard final : public c10::impl::NoOpDeviceGuardImpl<CUDA> {
  static constexpr c10::DeviceType static_type = CUDA;
  c10::Device getDevice() const override { return kCuda; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kCuda); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : public at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
}  // namespace

#define VISIBLE __attribute__((visibility("default")))
VISIBLE const at::CUDAHooksInterface& at::detail::getCUDAHooks() {
  static Hooks hooks;
  return hooks;
}
VISIBLE std::optional<c10::DeviceType> at::accelerator::getAccelerator(bool) { return CUDA; }
