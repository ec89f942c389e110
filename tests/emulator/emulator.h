// What the device and the backend of the emulator share.
#pragma once

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace emulator {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// How often since the last reset; an accelerator's host waits at `items`, `to_host`, `to_device` and `synchronisations`.
enum Count { kernels, items, to_host, to_device, synchronisations, collectives, kCounts };
inline const char* const kNames[] = {"kernels", "items", "to_host", "to_device", "synchronisations", "collectives"};
inline std::atomic<long> counts[kCounts];

// A collective that has been issued. On the device, whatever was issued later comes after it.
class Pending {
 public:
  void finish(std::exception_ptr error) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      done_ = true;
      error_ = error;
    }
    condition_.notify_all();
  }
  bool done() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return done_;
  }
  bool succeeded() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return done_ && !error_;
  }
  void wait() {
    if (Py_IsInitialized() && PyGILState_Check()) {
      pybind11::gil_scoped_release release;
      wait_without_gil();
    } else {
      wait_without_gil();
    }
  }

 private:
  void wait_without_gil() {
    std::unique_lock<std::mutex> lock(mutex_);
    condition_.wait(lock, [this] { return done_; });
    if (error_) std::rethrow_exception(error_);
  }
  mutable std::mutex mutex_;
  std::condition_variable condition_;
  bool done_ = false;
  std::exception_ptr error_;
};

// `Work.wait` puts a collective here and returns: the device's next kernel waits for it, the host does not.
void let_device_wait(std::shared_ptr<Pending> pending);
std::vector<std::shared_ptr<Pending>> awaited_by_device();
// What the device does before a kernel, a copy or a synchronisation.
void catch_up();

// The collective that is being issued in this thread: an event recorded meanwhile stands for its end.
extern thread_local std::shared_ptr<Pending> issued;

int device_count();

// A CPU tensor over the same memory, which it does not keep alive.
at::Tensor on_host(const at::Tensor& tensor);

inline std::string setting(const char* name, const char* otherwise = "") {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

void bind_backend(pybind11::module& module);

}  // namespace emulator
