// "fakenccl": a process-group backend for fakegpu over gloo, with NCCL's rules.
//
// Collectives return when they have been issued, and run one after another in a thread of their communicator's (with
// FAKENCCL_SERIAL=device in one for all communicators, as on a device where all of them take all of it; with
// CUDA_LAUNCH_BLOCKING=1 the host waits for each). A communicator is made at the first collective of a device index,
// by all ranks at once. What NCCL refuses is refused: tensors of another device, types, operations, two ranks on one
// device. Who does not ask for a collective's work gets none: the current stream waits. FAKENCCL_DELAY_US=N lets each
// collective take up to N microseconds longer; FAKENCCL_LOG=FOLDER writes each rank's collectives, in the order in which
// they were issued.
#include "emulator.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

#include <deque>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <thread>

namespace emulator {
namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Runs one task after another, in a thread that nobody waits for: a process may leave while a collective waits for a
// peer that is gone.
class Worker {
 public:
  Worker() { std::thread([this] { run(); }).detach(); }
  void push(std::function<void()> task) {
    std::lock_guard<std::mutex> guard(mutex_);  // until all is done: what is pushed last deletes this object
    tasks_.push_back(std::move(task));
    condition_.notify_one();
  }
  // After what has been pushed; this object goes with its thread.
  void end() { push(nullptr); }

 private:
  void run() {
    while (true) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        condition_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (!task) break;
      task();
    }
    { std::lock_guard<std::mutex> guard(mutex_); }
    delete this;
  }

  std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<std::function<void()>> tasks_;
};

Worker* worker_of_device() {
  static Worker* worker = new Worker();
  return worker;
}

// Complete for the host as soon as it has been issued; its future's event stands for its end on the device.
class EmulatedWork final : public c10d::Work {
 public:
  EmulatedWork(int rank, OpType type, std::shared_ptr<Pending> pending, const Tensors& outputs, bool host_waits)
      : Work(rank, type), pending_(std::move(pending)), outputs_(outputs), host_waits_(host_waits) {
    std::vector<c10::Device> devices;
    if (!outputs.empty()) devices.push_back(outputs[0].device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    issued = pending_;
    future_->markCompleted(c10::IValue(outputs));
    issued = nullptr;
  }
  bool isCompleted() override { return pending_->done(); }
  bool isSuccess() const override { return pending_->succeeded(); }
  std::vector<Tensor> result() override { return outputs_; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (host_waits_ || setting("TORCH_NCCL_BLOCKING_WAIT") == "1") {
      pending_->wait();
      order.host_waits(pending_->past);
    } else {
      let_device_wait(pending_);
    }
  }
  void blockCurrentStream() { let_device_wait(pending_); }
  void abort() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::shared_ptr<Pending> pending_;
  Tensors outputs_;
  bool host_waits_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensors joined(Tensors all, const Tensors& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

Tensors flat(const Lists& lists) {
  Tensors all;
  for (const auto& list : lists) all = joined(std::move(all), list);
  return all;
}

// The memory of a dense tensor in one dimension: gloo wants it contiguous.
Tensor dense(const Tensor& tensor) { return at::as_strided(on_host(tensor), {tensor.numel()}, {1}); }

Tensors dense(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) all.push_back(dense(tensor));
  return all;
}

Lists dense(const Lists& lists) {
  Lists all;
  for (const auto& list : lists) all.push_back(dense(list));
  return all;
}

// Older torch (2.6) lacks some of what a backend can say and be told: what has no `override` here is not asked for there.
template <class Options, class Known = c10d::AllreduceOptions>
bool is_asynchronous(const Options& options) {
  if constexpr (requires(Known known) { known.asyncOp; }) return options.asyncOp;
  return true;  // it waits itself
}
template <class Gloo>
void set_timeout(Gloo& gloo, std::chrono::milliseconds timeout) {
  if constexpr (requires { gloo.setTimeout(timeout); }) gloo.setTimeout(timeout);
}

class Backend final : public c10d::Backend {
 public:
  Backend(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, int rank, int size,
          std::chrono::milliseconds timeout, std::string name)
      : c10d::Backend(rank, size),
        gloo_(std::move(gloo)),
        store_(std::move(store)),
        name_(std::move(name)),
        options_(c10::make_intrusive<Options>("fakenccl", timeout)),
        owns_worker_(setting("FAKENCCL_SERIAL") != "device"),
        worker_(owns_worker_ ? new Worker() : worker_of_device()),
        delays_(rank * 7919 + 1) {}
  ~Backend() override {
    if (owns_worker_) worker_->end();
  }

  const std::string getBackendName() const override { return "fakenccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) {
    options_->timeout = timeout;
    set_timeout(*gloo_, timeout);
  }
  void abort() { abandon(); }
  bool supportsCoalescing() const { return true; }

  // What is issued in between is launched by the end, as one.
  void startCoalescing() override {
    TORCH_CHECK(!coalescing_, "fakenccl: a coalesced group is open already");
    coalescing_ = true;
  }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    auto tasks = std::move(coalesced_);
    coalesced_.clear();
    if (tasks.empty()) return WorkPtr();
    std::shared_ptr<Pending> last;
    for (auto& [pending, task] : tasks) {
      worker_->push(std::move(task));
      last = pending;
    }
    if (setting("CUDA_LAUNCH_BLOCKING") == "1") last->wait();
    return c10::make_intrusive<EmulatedWork>(getRank(), OpType::COALESCED, last, Tensors(), false);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors sent = real(tensors);
    return given(is_asynchronous(options),
                 issue("broadcast", OpType::BROADCAST, sent, tensors,
                       [gloo = gloo_, host = dense(sent), options]() mutable { gloo->broadcast(host, options)->wait(); }));
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensors sent = real(options.reduceOp, tensors);
    check(options.reduceOp, sent);
    // NCCL averages whole numbers too, and cuts off what is left; older gloo averages nothing.
    bool averages = options.reduceOp == c10d::ReduceOp::AVG, cuts_off = !at::isFloatingType(sent[0].scalar_type());
    auto known = options;
    if (averages) known.reduceOp = c10d::ReduceOp::SUM;
    return given(is_asynchronous(options),
                 issue("allreduce", OpType::ALLREDUCE, sent, tensors,
                       [gloo = gloo_, host = dense(sent), size = getSize(), averages, cuts_off, known]() mutable {
                         gloo->allreduce(host, known)->wait();
                         if (averages && cuts_off) host[0].div_(size, "trunc");
                         if (averages && !cuts_off) host[0].div_(size);
                       }));
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    check(options.reduceOp, tensors);
    return given(is_asynchronous(options),
                 issue("allreduce_coalesced", OpType::ALLREDUCE_COALESCED, tensors, tensors,
                       [gloo = gloo_, host = dense(tensors), options]() mutable {
                         for (auto& each : host) {
                           Tensors one{each};
                           gloo->allreduce(one, options)->wait();
                         }
                       }));
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Tensors sent = real(options.reduceOp, tensors);
    check(options.reduceOp, sent);
    return given(is_asynchronous(options),
                 issue("reduce", OpType::REDUCE, sent, tensors,
                       [gloo = gloo_, host = dense(sent), options]() mutable { gloo->reduce(host, options)->wait(); }));
  }
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return given(is_asynchronous(options),
                 issue("allgather", OpType::ALLGATHER, joined(inputs, flat(outputs)), flat(outputs),
                       [gloo = gloo_, to = dense(outputs), from = dense(inputs), options]() mutable {
                         gloo->allgather(to, from, options)->wait();
                       }));
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return given(is_asynchronous(options),
                 issue("allgather_base", OpType::_ALLGATHER_BASE, {input, output}, {output},
                       [gloo = gloo_, to = dense(output), from = dense(input), options]() mutable {
                         gloo->_allgather_base(to, from, options)->wait();
                       }));
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return given(is_asynchronous(options),
                 issue("allgather_coalesced", OpType::COALESCED, joined(inputs, outputs), outputs,
                       [gloo = gloo_, to = dense(outputs), from = dense(inputs), options]() mutable {
                         for (size_t i = 0; i < to.size(); i++) gloo->_allgather_base(to[i], from[i], options)->wait();
                       }));
  }
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return given(is_asynchronous(options),
                 issue("gather", OpType::GATHER, joined(inputs, flat(outputs)), flat(outputs),
                       [gloo = gloo_, to = dense(outputs), from = dense(inputs), options]() mutable {
                         gloo->gather(to, from, options)->wait();
                       }));
  }
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    return given(is_asynchronous(options),
                 issue("scatter", OpType::SCATTER, joined(outputs, flat(inputs)), outputs,
                       [gloo = gloo_, to = dense(outputs), from = dense(inputs), options]() mutable {
                         gloo->scatter(to, from, options)->wait();
                       }));
  }
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    check(options.reduceOp, outputs);
    return given(is_asynchronous(options),
                 issue("reduce_scatter", OpType::REDUCE_SCATTER, joined(outputs, flat(inputs)), outputs,
                       [gloo = gloo_, to = dense(outputs), from = dense(inputs), options]() mutable {
                         gloo->reduce_scatter(to, from, options)->wait();
                       }));
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check(options.reduceOp, {output});
    return given(is_asynchronous(options),
                 issue("reduce_scatter_base", OpType::_REDUCE_SCATTER_BASE, {input, output}, {output},
                       [gloo = gloo_, to = dense(output), from = dense(input), options]() mutable {
                         gloo->_reduce_scatter_base(to, from, options)->wait();
                       }));
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    check(options.reduceOp, outputs);
    return given(is_asynchronous(options),
                 issue("reduce_scatter_coalesced", OpType::_REDUCE_SCATTER_BASE, joined(inputs, outputs), outputs,
                       [gloo = gloo_, to = dense(outputs), from = dense(inputs), options]() mutable {
                         for (size_t i = 0; i < to.size(); i++) gloo->_reduce_scatter_base(to[i], from[i], options)->wait();
                       }));
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
                        const c10d::AllToAllOptions& options) override {
    // Sizes count rows, so that the tensors keep their shapes.
    return given(is_asynchronous(options),
                 issue("alltoall_base", OpType::ALLTOALL_BASE, {input, output}, {output},
                       [gloo = gloo_, to = on_host(output), from = on_host(input), to_sizes, from_sizes, options]() mutable {
                         gloo->alltoall_base(to, from, to_sizes, from_sizes, options)->wait();
                       }));
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return given(is_asynchronous(options),
                 issue("alltoall", OpType::ALLTOALL, joined(inputs, outputs), outputs,
                       [gloo = gloo_, to = dense(outputs), from = dense(inputs), options]() mutable {
                         std::vector<int64_t> to_sizes, from_sizes;
                         for (const auto& each : to) to_sizes.push_back(each.numel());
                         for (const auto& each : from) from_sizes.push_back(each.numel());
                         Tensor sent = at::cat(from), got = at::empty_like(at::cat(to));
                         auto pieces = at::split_with_sizes(got, to_sizes);
                         gloo->alltoall_base(got, sent, to_sizes, from_sizes, options)->wait();
                         for (size_t i = 0; i < to.size(); i++) to[i].copy_(pieces[i]);
                       }));
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return issue("send", OpType::SEND, tensors, {},
                 [gloo = gloo_, host = dense(tensors), to, tag]() mutable { gloo->send(host, to, tag)->wait(); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return issue("recv", OpType::RECV, tensors, tensors,
                 [gloo = gloo_, host = dense(tensors), from, tag]() mutable { gloo->recv(host, from, tag)->wait(); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    Tensor token = at::empty({1}, at::TensorOptions().dtype(at::kByte).device(c10::Device(kDevice, barrier_on(options))));
    return issue("barrier", OpType::BARRIER, {token}, {}, [gloo = gloo_] { gloo->barrier(c10d::BarrierOptions())->wait(); },
                 true);
  }

 private:
  // As ProcessGroupNCCL chooses.
  c10::DeviceIndex barrier_on(const c10d::BarrierOptions& options) {
    if (!options.device_ids.empty()) return options.device_ids[0];
    if (getBoundDeviceId()) return getBoundDeviceId()->index();
    std::lock_guard<std::mutex> guard(communicators_mutex_);
    return communicators_.empty() ? getRank() % device_count() : *communicators_.begin();
  }

  // As ProcessGroupNCCL does in some collectives: a complex number is two real ones.
  static Tensors real(const Tensors& tensors) {
    Tensors all;
    for (const auto& tensor : tensors) all.push_back(tensor.is_complex() ? at::view_as_real(tensor) : tensor);
    return all;
  }
  static Tensors real(const c10d::ReduceOp& operation, const Tensors& tensors) {
    auto kind = static_cast<c10d::ReduceOp::RedOpType>(operation.op_);
    return kind == c10d::ReduceOp::SUM || kind == c10d::ReduceOp::AVG ? real(tensors) : tensors;
  }

  static void check(const Tensors& tensors) {
    static const std::set<at::ScalarType> known{at::kFloat, at::kHalf, at::kDouble, at::kBFloat16,      at::kChar,         at::kByte,
                                                at::kInt,   at::kLong, at::kBool,   at::kFloat8_e4m3fn, at::kFloat8_e5m2};
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.device().type() == kDevice && tensor.layout() == at::kStrided,
                  "Tensors must be CUDA and dense (fakenccl got one on ", tensor.device(), ")");
      TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous (fakenccl)");
      TORCH_CHECK_TYPE(known.count(tensor.scalar_type()),
                       "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
      TORCH_CHECK(tensor.device() == tensors[0].device(), "Tensors of one call must be on one device (fakenccl)");
    }
  }
  static void check(const c10d::ReduceOp& operation, const Tensors& tensors) {
    auto kind = static_cast<c10d::ReduceOp::RedOpType>(operation.op_);
    TORCH_CHECK_VALUE(kind != c10d::ReduceOp::BAND && kind != c10d::ReduceOp::BOR && kind != c10d::ReduceOp::BXOR,
                      "Cannot use ReduceOp.BAND, BOR or BXOR with NCCL (fakenccl)");
    TORCH_CHECK_TYPE(kind != c10d::ReduceOp::AVG || tensors[0].scalar_type() != at::kBool,
                     "Cannot use ReduceOp.AVG with Bool inputs (fakenccl)");
  }

  // As ncclCommInitRank does, the host waits until all ranks have come.
  void connect(c10::DeviceIndex index) {
    std::lock_guard<std::mutex> guard(communicators_mutex_);
    if (communicators_.count(index)) return;
    std::string key = "communicator/" + std::to_string(communicators_.size()) + "/";
    auto meet = [&] {
      store_->set(key + std::to_string(getRank()), std::to_string(int(index)));
      std::map<std::string, int> ranks;
      for (int rank = 0; rank < getSize(); rank++) {
        store_->wait({key + std::to_string(rank)}, options_->timeout);
        auto found = store_->get(key + std::to_string(rank));
        auto [other, added] = ranks.emplace(std::string(found.begin(), found.end()), rank);
        TORCH_CHECK(added, "ncclInvalidUsage: Duplicate GPU detected : rank ", other->second, " and rank ", rank,
                    " both on fakegpu:", other->first, " (", name_, ")");
      }
    };
    try {
      std::optional<pybind11::gil_scoped_release> release;
      if (PyGILState_Check()) release.emplace();
      meet();
    } catch (const c10::Error& error) {
      C10_THROW_ERROR(DistBackendError, error.what_without_backtrace());
    } catch (const std::exception& error) {  // a store's
      C10_THROW_ERROR(DistBackendError, std::string("fakenccl cannot connect the ranks: ") + error.what());
    }
    communicators_.insert(index);
  }

  void log(const char* name, const Tensor& first) {
    static std::mutex mutex;
    static std::ofstream file;
    std::string folder = setting("FAKENCCL_LOG");
    if (folder.empty()) return;
    std::lock_guard<std::mutex> guard(mutex);
    if (!file.is_open()) file.open(folder + "/" + std::to_string(getpid()), std::ios::app);
    file << name_ << " " << name << " " << first.scalar_type() << " " << first.numel() << " fakegpu:"
         << int(first.device().index()) << std::endl;
  }

  WorkPtr given(bool is_asynchronous, WorkPtr work) {
    if (is_asynchronous) return work;
    if (!coalescing_) work->wait();
    return WorkPtr();
  }

  static bool is_among(const Tensor& tensor, const Tensors& others) {
    return std::any_of(others.begin(), others.end(), [&](auto& each) { return each.is_alias_of(tensor); });
  }

  static long next_stream() {
    static std::atomic<long> last{-1};
    return last--;
  }

  WorkPtr issue(const char* name, OpType type, Tensors tensors, const Tensors& outputs, std::function<void()> run,
                bool host_waits = false) {
    TORCH_CHECK(!tensors.empty(), "fakenccl: nothing to send");
    check(tensors);
    connect(tensors[0].device().index());
    counts[collectives]++;
    log(name, tensors[0]);
    auto pending = std::make_shared<Pending>();
    order.wait(stream_, order.past(current_stream()));
    order.begin(stream_);
    for (auto& each : tensors) order.touch(stream_, each.storage().data(), is_among(each, outputs), name);
    pending->past = order.past(stream_);
    int most = std::stoi(setting("FAKENCCL_DELAY_US", "0"));
    int delay = most ? std::uniform_int_distribution<int>(0, most)(delays_) : 0;
    // What the device waits for already comes first.
    std::function<void()> task = [pending, run = std::move(run), tensors = std::move(tensors), delay,
                                  inference = c10::InferenceMode::is_enabled(),
                                  before = awaited_by_device()]() mutable {
      c10::InferenceMode mode(inference);
      std::exception_ptr error;
      try {
        for (auto& each : before) each->wait();
        if (delay) usleep(delay);
        run();
      } catch (...) {
        error = std::current_exception();
      }
      run = nullptr;
      tensors.clear();
      pending->finish(error);
    };
    if (coalescing_) {
      coalesced_.emplace_back(pending, std::move(task));
    } else {
      worker_->push(std::move(task));
      if (setting("CUDA_LAUNCH_BLOCKING") == "1") {
        pending->wait();
        order.host_waits(pending->past);
      }
    }
    return c10::make_intrusive<EmulatedWork>(getRank(), type, pending, outputs, host_waits);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  c10::intrusive_ptr<Options> options_;
  const bool owns_worker_;
  Worker* worker_;
  const long stream_ = next_stream();  // those of kernels are not negative
  std::mt19937 delays_;
  std::mutex communicators_mutex_;
  std::set<c10::DeviceIndex> communicators_;
  bool coalescing_ = false;
  std::vector<std::pair<std::shared_ptr<Pending>, std::function<void()>>> coalesced_;
};

}  // namespace

void bind_backend(pybind11::module& module) {
  module.def("set_timeout", [](c10::intrusive_ptr<c10d::Backend> backend, std::chrono::milliseconds timeout) {
    static_cast<Backend&>(*backend).setTimeout(timeout);
  });
  module.def("create_backend", [](c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, int rank,
                                  int size, std::chrono::milliseconds timeout, std::string name) {
    return c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<Backend>(std::move(gloo), std::move(store), rank, size, timeout, std::move(name)));
  });
}

}  // namespace emulator
