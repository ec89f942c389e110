// What the device and the backend of the emulator share.
#pragma once

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace emulator {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// How often since the last reset; an accelerator's host waits at `items`, `to_host`, `to_device` and `synchronisations`.
enum Count { kernels, items, to_host, to_device, synchronisations, collectives, kCounts };
inline const char* const kNames[] = {"kernels", "items", "to_host", "to_device", "synchronisations", "collectives"};
inline std::atomic<long> counts[kCounts];

// What has come before: by stream, how many of its kernels and collectives.
using Past = std::map<long, long>;

// Which stream has waited for which: kernels run at once here, so that a stream that does not wait for what another one
// has written, as it would have to, shows in nothing else.
class Order {
 public:
  // Something begins on a stream.
  void begin(long stream) {
    std::lock_guard<std::mutex> guard(mutex_);
    Past& past = streams_[stream];
    add(past, host_);
    past[stream]++;
  }
  // What began last on a stream reads or writes memory.
  void touch(long stream, const void* memory, bool writes, const std::string& what) {
    if (!memory) return;
    std::lock_guard<std::mutex> guard(mutex_);
    Past& past = streams_[stream];
    auto text = what + " on stream " + std::to_string(stream);
    Touched& touched = memory_[memory];
    for (auto* before : {&touched.written, writes ? &touched.read : nullptr})
      for (auto& [other, one] : before ? *before : Accesses())
        if (past[other] < one.first && races_.size() < 10) races_.insert(text + " does not wait for " + one.second);
    if (writes) touched = {};
    (writes ? touched.written : touched.read)[stream] = {past[stream], text};
  }
  void forget(const void* memory) {
    std::lock_guard<std::mutex> guard(mutex_);
    memory_.erase(memory);
  }
  Past past(long stream) {
    std::lock_guard<std::mutex> guard(mutex_);
    add(streams_[stream], host_);
    return streams_[stream];
  }
  void wait(long stream, const Past& past) {
    std::lock_guard<std::mutex> guard(mutex_);
    add(streams_[stream], past);
  }
  void host_waits(const Past& past) {
    std::lock_guard<std::mutex> guard(mutex_);
    add(host_, past);
  }
  void host_waits_for_all() {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto& [_, past] : streams_) add(host_, past);
  }
  std::vector<std::string> take_races() {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<std::string> found(races_.begin(), races_.end());
    races_.clear();
    memory_.clear();
    return found;
  }

 private:
  using Accesses = std::map<long, std::pair<long, std::string>>;  // by stream, the last one
  struct Touched {
    Accesses written, read;
  };
  static void add(Past& past, const Past& more) {
    for (auto& [stream, time] : more) past[stream] = std::max(past[stream], time);
  }
  std::mutex mutex_;
  std::map<long, Past> streams_;
  Past host_;
  std::map<const void*, Touched> memory_;
  std::set<std::string> races_;
};
inline Order& order = *new Order;

// The current stream of this thread.
long current_stream();

// A collective that has been issued. On the device, whatever was issued later comes after it.
class Pending {
 public:
  Past past;  // with itself
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
// The device waits for no collective any more.
void abandon();

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
