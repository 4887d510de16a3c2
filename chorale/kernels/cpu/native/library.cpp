// What Python calls (by ctypes), and the choice of the instruction set.
#include <cstring>
#include <vector>

#include "pool.h"
#include "table.h"

namespace chorale {
extern const Table table_generic, table_avx2, table_avxvnni, table_avx512, table_neon;
}  // namespace chorale

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace {
using chorale::Table;

#if defined(__x86_64__)
bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool has_avxvnni() {
    unsigned a = 7, b, c = 1, d;
    asm("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return has_avx2() && (a >> 4 & 1) != 0;
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif
#if defined(__aarch64__) && defined(__linux__)
bool has_neon() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#else
[[maybe_unused]] bool has_neon() { return true; }  // every Apple processor has dot products
#endif
bool has_generic() { return true; }

struct Choice {
    const Table* table;
    bool (*is_there)();
};

const Choice kChoices[] = {  // the fastest first
#if defined(HAS_AVX512)
    {&chorale::table_avx512, has_avx512},
#endif
#if defined(HAS_AVXVNNI)
    {&chorale::table_avxvnni, has_avxvnni},
#endif
#if defined(HAS_AVX2)
    {&chorale::table_avx2, has_avx2},
#endif
#if defined(HAS_NEON)
    {&chorale::table_neon, has_neon},
#endif
    {&chorale::table_generic, has_generic},
};
}  // namespace

extern "C" {

#define EXPORT __attribute__((visibility("default")))

EXPORT const char* chorale_cpu_sources() { return SOURCES; }  // what this was built from; library.py compares

// The best instruction set that this processor has, or the one of that name. Null: it has no such one.
EXPORT const Table* chorale_cpu_table(const char* name) {
    for (const Choice& each : kChoices)
        if (each.is_there() && (name == nullptr || std::strcmp(name, each.table->name) == 0)) return each.table;
    return nullptr;
}

// cpus [count]: the processor that each thread stays on, but for the first, which is the caller's. Null: any.
EXPORT void chorale_cpu_threads(int count, const int* cpus) {
    count = count < 1 ? 1 : count;
    chorale::Pool::shared().resize(count, cpus == nullptr ? std::vector<int>() : std::vector<int>(cpus, cpus + count));
}
}
