#define CHORALE_TILES  // AMX; compilers name it differently
#define CHORALE_ISA "isa/avx512.h"
#define CHORALE_TABLE table_amx
#include "kernels.inc"
