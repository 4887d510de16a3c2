#define CHORALE_ISA "isa/avx512.h"
#define CHORALE_TABLE table_avx512
#include "kernels.inc"
