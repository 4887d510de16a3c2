// Threads that work on one op at a time. Tasks are taken from a shared counter, so a thread that the system
// has suspended holds up one task only. Which thread does a task never changes its result.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

namespace chorale {

class Pool {
  public:
    // Runs body(context, task) for every task in [0, num_tasks); returns when all have ended.
    using Body = void (*)(void* context, long task);
    void run(Body body, void* context, long num_tasks);

    // Threads that take part from now on, the caller's included. cpus: the processor of each, or none.
    void resize(int num_threads, const std::vector<int>& cpus);
    int num_threads() const { return num_threads_; }

    static Pool& shared();

  private:
    struct Threads;
    int num_threads_ = 1;
    std::vector<int> cpus_;
    Threads* threads_ = nullptr;
};

template <class F> void parallel(long num_tasks, const F& body) {
    Pool::shared().run([](void* context, long task) { (*static_cast<const F*>(context))(task); },
                       const_cast<F*>(&body), num_tasks);
}

}  // namespace chorale
