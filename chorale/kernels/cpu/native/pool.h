// Threads that work on one op at a time. They take tasks from a shared counter, so a thread that the system
// suspends delays one task only. A task's result does not depend on the thread that runs it.
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

    // Sets the number of threads, including the caller's. cpus: the processor of each thread, or empty.
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
