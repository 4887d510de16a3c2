#include "pool.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#else
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace chorale {
namespace {

constexpr int kSpins = 4000;  // about 50 us: longer than the gap between two ops of a step

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void bind_to(int cpu) {
#if defined(__linux__)
    cpu_set_t own;
    CPU_ZERO(&own);
    if (cpu < 0 || cpu >= CPU_SETSIZE) return;
    CPU_SET(cpu, &own);
    pthread_setaffinity_np(pthread_self(), sizeof own, &own);
#else
    (void)cpu;
#endif
}

}  // namespace

// A thread that wakes up late must neither delay a job whose tasks are done nor mistake a task of the next
// job for one of the old job. So the task counter contains the job's number, and a job ends with its last
// task, whether or not all threads have noticed the job.
struct Pool::Threads {
    std::vector<std::thread> threads;
    std::mutex mutex, sleep;
    std::condition_variable wake;
    alignas(64) std::atomic<uint64_t> next{0};  // job number << 32 | next task
    alignas(64) std::atomic<long> done{0};
    std::atomic<Body> body{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<long> num_tasks{0};
    std::atomic<bool> ending{false};
    pid_t owner = getpid();

    uint64_t number() const { return next.load(std::memory_order_acquire) >> 32; }

    void work(uint64_t number) {
        const Body run = body.load(std::memory_order_relaxed);
        void* const with = context.load(std::memory_order_relaxed);
        const auto end = static_cast<uint64_t>(num_tasks.load(std::memory_order_relaxed));
        std::atomic_thread_fence(std::memory_order_acquire);
        uint64_t place = next.load(std::memory_order_relaxed);
        while (place >> 32 == number && (place & 0xFFFFFFFF) < end) {
            // Succeeds only if the job is still the same, so the values read above belong to it.
            if (!next.compare_exchange_weak(place, place + 1, std::memory_order_acq_rel)) continue;
            run(with, static_cast<long>(place & 0xFFFFFFFF));
            done.fetch_add(1, std::memory_order_release);
            place = next.load(std::memory_order_acquire);
        }
    }

    void loop(int cpu) {
        if (cpu >= 0) bind_to(cpu);
        for (uint64_t seen = 0; !ending.load(std::memory_order_acquire);) {
            for (int spins = 0; number() == seen;) {
                if (++spins < kSpins) {
                    relax();
                    continue;
                }
                std::unique_lock lock(sleep);
                wake.wait(lock, [&] { return number() != seen; });
            }
            seen = number();
            work(seen);
        }
    }

    void start(int count, const std::vector<int>& cpus) {
        for (int thread = 1; thread < count; thread++) {
            const int cpu = cpus.empty() ? -1 : cpus[static_cast<size_t>(thread)];
            threads.emplace_back([this, cpu] { loop(cpu); });
        }
    }

    uint64_t publish(Body run, void* with, long count) {
        const uint64_t before = number(), made = (before + 1) & 0xFFFFFFFF;
        next.store(before << 32 | 0xFFFFFFFF, std::memory_order_release);  // no tasks are left
        body.store(run, std::memory_order_relaxed);
        context.store(with, std::memory_order_relaxed);
        num_tasks.store(count, std::memory_order_relaxed);
        done.store(0, std::memory_order_relaxed);
        {
            std::lock_guard lock(sleep);
            next.store(made << 32, std::memory_order_release);
        }
        wake.notify_all();
        return made;
    }

    void run(Body run, void* with, long count) {
        work(publish(run, with, count));
        for (int spins = 0; done.load(std::memory_order_acquire) < count;) {
            if (++spins < kSpins) relax();
            else std::this_thread::yield();
        }
    }

    void end() {
        ending.store(true, std::memory_order_release);
        publish(nullptr, nullptr, 0);
        for (auto& each : threads) each.join();
    }
};

Pool& Pool::shared() {
    static Pool* pool = new Pool;  // never destroyed: threads may run while the process ends
    return *pool;
}

void Pool::resize(int num_threads, const std::vector<int>& cpus) {
    static std::mutex* one_at_a_time = new std::mutex;
    std::lock_guard lock(*one_at_a_time);
    const bool is_forked = threads_ != nullptr && threads_->owner != getpid();
    if (num_threads == num_threads_ && cpus == cpus_ && threads_ != nullptr && !is_forked) return;
    if (threads_ != nullptr && !is_forked) {
        std::lock_guard busy(threads_->mutex);
        threads_->end();
    }  // after a fork the threads are gone; their memory is not freed
    threads_ = new Threads;
    threads_->start(num_threads, cpus);
    num_threads_ = num_threads;
    cpus_ = cpus;
}

void Pool::run(Body body, void* context, long num_tasks) {
    if (num_tasks <= 0) return;
    Threads* threads = threads_;
    std::unique_lock<std::mutex> mine;
    if (num_tasks > 1 && num_threads_ > 1 && threads != nullptr && threads->owner == getpid())
        mine = std::unique_lock(threads->mutex, std::try_to_lock);
    if (mine.owns_lock()) {
        threads->run(body, context, num_tasks);
    } else {  // another thread uses the pool: compute in this thread alone
        for (long task = 0; task < num_tasks; task++) body(context, task);
    }
}

}  // namespace chorale
