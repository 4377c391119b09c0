// Presents a compiled kernel to XLA without Python: takes a custom call's operands and results in
// XLA's order and calls the kernel in its own, filling in constants and sizes.
#include <dlfcn.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

namespace ffi = tvm::ffi;

enum Kind : int64_t { kConstant, kTensor, kSwapped, kSize, kPart, kCache };

// `first` and `second` are axis and factor of a size, start and length of a part, offset in elements
// of a cache and where its shape and strides are in `layouts`.
struct Argument {
  int64_t kind, index, first, second;
};

constexpr int kMaxArguments = 64;
constexpr int kMaxViews = 8;
constexpr int kMaxRank = 8;

// Another view of an operand's memory.
struct View {
  DLTensor tensor;
  int64_t shape[kMaxRank], strides[kMaxRank];

  // Elements start to start + length of a vector.
  void Part(const DLTensor* source, int64_t start, int64_t length) {
    TVM_FFI_ICHECK(source->ndim == 1 && start + length <= source->shape[0]) << "no such part";
    shape[0] = length;
    strides[0] = 1;
    tensor = *source;
    tensor.data = static_cast<char*>(source->data) + start * (source->dtype.bits / 8);
    tensor.shape = shape;
    tensor.strides = strides;
  }

  // Axes 1 and 2 exchanged: other strides.
  void Swap(const DLTensor* source) {
    TVM_FFI_ICHECK(source->ndim >= 3 && source->ndim <= kMaxRank) << "rank " << source->ndim;
    int64_t stride = 1;
    for (int axis = source->ndim - 1; axis >= 0; --axis) {
      shape[axis] = source->shape[axis];
      strides[axis] = stride;  // XLA's operands are row-major
      stride *= shape[axis];
    }
    std::swap(shape[1], shape[2]);
    std::swap(strides[1], strides[2]);
    tensor = *source;
    tensor.shape = shape;
    tensor.strides = strides;
  }

  // Elements from `offset` on as an array of four axes; `layout` is its shape and its strides.
  void Cache(const DLTensor* source, int64_t offset, const int64_t* layout) {
    std::copy(layout, layout + 4, shape);
    std::copy(layout + 4, layout + 8, strides);
    tensor = *source;
    tensor.data = static_cast<char*>(source->data) + offset * (source->dtype.bits / 8);
    tensor.ndim = 4;
    tensor.shape = shape;
    tensor.strides = strides;
  }
};

// Makes the GPU of a call the current one of its thread, as kernels expect, with CUDA's driver. None
// in a process without a driver.
class Current {
 public:
  explicit Current(int device) {
    static const Driver driver;
    int current = -1;
    if (!driver.push || (driver.get_device(&current) == 0 && current == device)) return;
    void* context = nullptr;
    // The context that the runtime and XLA use. It is never released: they hold it anyway.
    TVM_FFI_ICHECK(driver.retain(&context, device) == 0) << "no context on GPU " << device;
    TVM_FFI_ICHECK(driver.push(context) == 0) << "no context on GPU " << device;
    pop_ = driver.pop;
  }
  ~Current() {
    void* context = nullptr;
    if (pop_) pop_(&context);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  struct Driver {
    int (*get_device)(int*) = nullptr;
    int (*retain)(void**, int) = nullptr;
    int (*push)(void*) = nullptr;
    int (*pop)(void**) = nullptr;

    Driver() {
      void* library = dlopen("libcuda.so.1", RTLD_LAZY);
      if (!library) return;
      Find(library, "cuCtxGetDevice", &get_device);
      Find(library, "cuDevicePrimaryCtxRetain", &retain);
      Find(library, "cuCtxPopCurrent_v2", &pop);
      Find(library, "cuCtxPushCurrent_v2", &push);
    }

    template <typename Function>
    static void Find(void* library, const char* name, Function* function) {
      *function = reinterpret_cast<Function>(dlsym(library, name));
      TVM_FFI_ICHECK(*function) << "the CUDA driver has no " << name;
    }
  };

  int (*pop_)(void**) = nullptr;
};

// Kernel launches of this process, recordings of a command buffer included.
std::atomic<int64_t> num_calls{0};

int64_t Calls() { return num_calls; }

// `spec` holds four integers for each argument of a kernel: see Kind. Index is that of a constant
// or of a call argument. `kernels` are the same one for each of `devices`.
ffi::Function Adapt(ffi::Array<int64_t> devices, ffi::Array<ffi::Function> kernels,
                    ffi::Array<int64_t> spec, ffi::Array<ffi::Any> constants,
                    ffi::Array<int64_t> layouts) {
  std::vector<ffi::Function> by_device;
  for (size_t i = 0; i < devices.size(); ++i) {
    if (by_device.size() <= static_cast<size_t>(devices[i])) by_device.resize(devices[i] + 1);
    by_device[devices[i]] = kernels[i];
  }
  std::vector<Argument> arguments;
  for (size_t i = 0; i + 3 < spec.size(); i += 4) {
    arguments.push_back({spec[i], spec[i + 1], spec[i + 2], spec[i + 3]});
  }
  TVM_FFI_ICHECK(arguments.size() <= kMaxArguments) << "too many arguments: " << arguments.size();
  std::vector<int64_t> dims(layouts.begin(), layouts.end());
  return ffi::Function::FromPacked(
      [by_device, arguments, constants, dims](ffi::PackedArgs args, ffi::Any* result) {
        TVM_FFI_ICHECK(args.size() > 0) << "the call has no operands";
        size_t device = args[0].cast<DLTensor*>()->device.device_id;
        TVM_FFI_ICHECK(device < by_device.size() && by_device[device].defined())
            << "the kernel is not loaded on device " << device;
        ffi::AnyView values[kMaxArguments];
        View views[kMaxViews];
        int num_views = 0;
        for (size_t i = 0; i < arguments.size(); ++i) {
          const Argument& argument = arguments[i];
          if (argument.kind == kConstant) {
            values[i] = constants[argument.index];
            continue;
          }
          TVM_FFI_ICHECK(argument.index < args.size()) << "the call has too few operands";
          if (argument.kind == kTensor) {
            values[i] = args[argument.index];
            continue;
          }
          DLTensor* tensor = args[argument.index].cast<DLTensor*>();
          if (argument.kind == kSize) {
            values[i] = tensor->shape[argument.first] * argument.second;
            continue;
          }
          TVM_FFI_ICHECK(num_views < kMaxViews) << "too many views";
          View& view = views[num_views++];
          if (argument.kind == kPart) {
            view.Part(tensor, argument.first, argument.second);
          } else if (argument.kind == kCache) {
            view.Cache(tensor, argument.first, &dims[argument.second]);
          } else {
            view.Swap(tensor);
          }
          values[i] = &view.tensor;
        }
        ++num_calls;
        Current current(static_cast<int>(device));
        by_device[device].CallPacked(values, static_cast<int32_t>(arguments.size()), result);
      });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(adapt, Adapt);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(calls, Calls);
