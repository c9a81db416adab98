/* bf16 weights on the matrix unit, where compiler and machine have one. */
#ifndef PB_LINEAR_AMX_H
#define PB_LINEAR_AMX_H

#include "panels.h"

void pb_linear_amx(const linear_job *linear, int parts); /* parts: 1 to 3 bf16 numbers for an activation */

#endif
