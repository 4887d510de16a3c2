// The functions that Python calls (by ctypes), and the choice of the instruction set.
#include <cstring>
#include <vector>

#include "pool.h"
#include "table.h"

namespace chorale {
extern const Table table_generic, table_avx2, table_avxvnni, table_avx512, table_amx, table_neon, table_i8mm;
}  // namespace chorale

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
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

// Since 5.16, a process must request the tiles' state from Linux, which may refuse. It applies to threads and
// forks.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
bool has_amx() {
    unsigned a = 7, b, c = 0, d, e = 7, f = 1, g, h;
    asm("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    asm("cpuid" : "+a"(e), "=b"(g), "+c"(f), "=d"(h));
    const bool has_vbmi = (c >> 1 & 1) != 0, has_bf16 = (e >> 5 & 1) != 0;
    const bool has_tiles = (d >> 24 & 1) != 0 && (d >> 22 & 1) != 0;  // AMX-TILE, AMX-BF16
    return has_avx512() && has_vbmi && has_bf16 && has_tiles && may_use_tiles();
}
#endif
#if defined(__aarch64__) && defined(__linux__)
bool has_neon() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
bool has_i8mm() { return has_neon() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0; }
#else
[[maybe_unused]] bool has_neon() { return true; }  // every Apple processor has dot products
#if defined(__APPLE__) && defined(__aarch64__)
bool has_i8mm() {
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname("hw.optional.arm.FEAT_I8MM", &found, &size, nullptr, 0) == 0 && found != 0;
}
#endif
#endif
bool has_generic() { return true; }

struct Choice {
    const Table* table;
    bool (*is_there)();
};

const Choice kChoices[] = {  // in order of speed, the fastest first
#if defined(HAS_AMX)
    {&chorale::table_amx, has_amx},
#endif
#if defined(HAS_AVX512)
    {&chorale::table_avx512, has_avx512},
#endif
#if defined(HAS_AVXVNNI)
    {&chorale::table_avxvnni, has_avxvnni},
#endif
#if defined(HAS_AVX2)
    {&chorale::table_avx2, has_avx2},
#endif
#if defined(HAS_I8MM)
    {&chorale::table_i8mm, has_i8mm},
#endif
#if defined(HAS_NEON)
    {&chorale::table_neon, has_neon},
#endif
    {&chorale::table_generic, has_generic},
};
}  // namespace

extern "C" {

#define EXPORT __attribute__((visibility("default")))

EXPORT const char* chorale_cpu_sources() { return SOURCES; }  // digest of the sources, which library.py compares

// Returns the processor's best instruction set, or the named one. Null: the processor does not support it.
EXPORT const Table* chorale_cpu_table(const char* name) {
    for (const Choice& each : kChoices)
        if ((name == nullptr || std::strcmp(name, each.table->name) == 0) && each.is_there()) return each.table;
    return nullptr;
}

// cpus [count]: the processor of each thread, except the first, which is the caller's thread. Null: not
// bound.
EXPORT void chorale_cpu_threads(int count, const int* cpus) {
    count = count < 1 ? 1 : count;
    chorale::Pool::shared().resize(count, cpus == nullptr ? std::vector<int>() : std::vector<int>(cpus, cpus + count));
}
}
