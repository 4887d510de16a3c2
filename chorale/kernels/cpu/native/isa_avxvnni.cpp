#define CHORALE_ISA "isa/avx2.h"
#define CHORALE_TABLE table_avxvnni
#include "kernels.inc"
